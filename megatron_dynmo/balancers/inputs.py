"""Checking what callers pass to the balancers; every error names the number and what is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_dynmo.errors import BalanceError

__all__ = ["check_boundaries", "check_counts", "edge_row", "non_negative", "positive"]


def non_negative(values: Sequence[float], name: str, wanted: int) -> list[float]:
    """Plain Python numbers, finite and at least 0, as many as wanted.

    Raises:
        BalanceError: another number of them, or one that is negative, infinite or not a number.
    """
    # numpy's scalars lack the exact ratio that Python's numbers have.
    numbers = [x.item() if isinstance(x, np.generic) else x for x in values]
    if len(numbers) != wanted:
        raise BalanceError(f"{name} has {len(numbers)} numbers, {wanted} are needed")
    if numbers and not (min(numbers) >= 0 and math.isfinite(sum(numbers))):
        bad = next(i for i, x in enumerate(numbers) if not (math.isfinite(x) and x >= 0))
        raise BalanceError(
            f"{name}[{bad}] is {numbers[bad]}: finite numbers of at least 0 are needed"
        )
    return numbers


def positive(values: Sequence[float], name: str, wanted: int) -> list[float]:
    """As `non_negative`, and above 0.

    Raises:
        BalanceError: as there, or for a 0.
    """
    numbers = non_negative(values, name, wanted)
    if min(numbers) <= 0:
        raise BalanceError(f"{name}[{numbers.index(0)}] is 0: it must be above 0")
    return numbers


def edge_row(edges: tuple[float, float]) -> list[float]:
    """The extras of the first and the last stage.

    Raises:
        BalanceError: one is negative, infinite or not a number.
    """
    for name, value in zip(("first_stage_extra", "last_stage_extra"), edges, strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise BalanceError(f"{name} is {value}: a finite number of at least 0 is needed")
    return non_negative(edges, "extras", 2)


def check_counts(num_layers: int, num_stages: int, min_layers: int) -> None:
    """Refuse stages that cannot all have min_layers.

    Raises:
        BalanceError: naming the counts and which would do.
    """
    if num_stages < 1:
        raise BalanceError(f"{num_stages} stages: at least 1 is needed")
    if min_layers < 0:
        raise BalanceError(f"min_layers is {min_layers}: it cannot be negative")
    if num_layers < min_layers * num_stages:
        raise BalanceError(
            f"{num_layers} layers cannot give each of {num_stages} stages at least {min_layers}; "
            f"use at most {num_layers // min_layers} stages or min_layers="
            f"{num_layers // num_stages}"
        )


def check_boundaries(
    name: str, boundaries: Sequence[int], num_layers: int, num_stages: int
) -> list[int]:
    """Plain ascending boundaries from 0 to num_layers.

    Raises:
        BalanceError: they are not.
    """
    bounds = [int(b) for b in boundaries]
    backwards = any(a > b for a, b in pairwise(bounds))
    if len(bounds) < 2 or len(bounds) != num_stages + 1 or backwards or (
        (bounds[0], bounds[-1]) != (0, num_layers)
    ):  # fmt: skip
        raise BalanceError(
            f"{name} {bounds} do not describe {num_layers} layers on {num_stages} stages: "
            f"{num_stages + 1} ascending numbers from 0 to {num_layers} are needed"
        )
    return bounds

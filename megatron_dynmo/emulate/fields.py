"""Checks of single fields of an emulation file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_dynmo.errors import ConfigError

__all__ = ["check_object", "number"]


def check_object(
    value: Any, where: str, *, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> None:
    """Require an object with these fields and no others.

    Raises:
        ConfigError: names the place and the fields that lack or are unknown.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object, is {type(value).__name__}")
    known = (*required, *optional)
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise ConfigError(f"{where} has unknown {', '.join(unknown)}; known: {', '.join(known)}")
    missing = [name for name in required if name not in value]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")


def number(value: Any, where: str, *, is_positive: bool = False, is_whole: bool = False) -> float:
    """Require a finite number of at least 0.

    Args:
        value: what the file holds.
        where: its place, for errors.
        is_positive: whether it must be above 0.
        is_whole: whether it must be whole.

    Raises:
        ConfigError: names the place, what it holds and what it must hold.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        is_big_enough = value > 0 if is_positive else value >= 0
        if is_big_enough and (not is_whole or value == int(value)):
            return float(value)
    kind = "whole" if is_whole else "finite"
    bound = "above 0" if is_positive else "of at least 0"
    raise ConfigError(f"{where} is {value!r}, must be a {kind} number {bound}")

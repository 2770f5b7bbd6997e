"""Flags of Mixture of Depths."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import ClassVar

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags import count, flag, number
from megatron_dynmo.flags.group import FlagGroup
from megatron_dynmo.flags.pieces import pieces, require_increasing


@dataclass(frozen=True)
class CapacitySchedule:
    """The share of tokens that a routed block gets, by iteration.

    Attributes:
        steps: (iteration, capacity): the capacity from that 1-based iteration on; the first is 1.
    """

    steps: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, text: str) -> CapacitySchedule:
        """Read `CAPACITY` or `ITER:CAPACITY;ITER:CAPACITY...`.

        Raises:
            ConfigError: Names the piece that is wrong and what would be right.
        """
        parts = pieces(text)
        if len(parts) == 1 and ":" not in parts[0]:
            parts = [f"1:{parts[0]}"]
        steps = tuple(cls._step(piece) for piece in parts)
        if not steps or steps[0][0] != 1:
            raise ConfigError(
                f"--dynmo-mod-capacity '{text}' must say the capacity from iteration 1 on, for "
                "example '1:1.0;500:0.5;1000:0.125'"
            )
        require_increasing("--dynmo-mod-capacity", (iteration for iteration, _ in steps))
        return cls(steps)

    @staticmethod
    def _step(piece: str) -> tuple[int, float]:
        iteration, colon, capacity = piece.partition(":")
        try:
            step = (int(iteration), float(capacity)) if colon else (0, 0.0)
        except ValueError:
            step = (0, 0.0)
        if step[0] < 1 or not 0 < step[1] <= 1:
            raise ConfigError(
                f"--dynmo-mod-capacity: '{piece}' is neither a share above 0 and up to 1, as "
                "'0.125', nor ITER:SHARE, as '500:0.125'; iterations count from 1"
            )
        return step

    def at(self, iteration: int) -> float:
        """Return the capacity in a 1-based iteration."""
        return [share for start, share in self.steps if start <= max(iteration, 1)][-1]


def _coefficient(text: str) -> float:
    """Parse a number > 0."""
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


@dataclass(frozen=True)
class MixtureOfDepthsFlags(FlagGroup):
    """Which layers get only some of the tokens, and which tokens."""

    kind: ClassVar[str | None] = "mixture_of_depths"

    mod: bool = flag(
        False, "Mixture of Depths: every few layers a router sends only some tokens through a layer"
    )
    mod_capacity: str = flag(
        "0.125",
        "share of the tokens of a sequence that a routed layer gets; or, by iteration, "
        "ITER:SHARE[;ITER:SHARE...]",
        metavar="TEXT",
    )
    mod_every: int = flag(
        2, "route layers N, 2N, 3N, ...; the others get all tokens", type=count, metavar="N"
    )
    mod_routing: str = flag(
        "expert-choice",
        "expert-choice: the tokens that the router ranks highest, which looks ahead, also in "
        "evaluation; threshold: trained so, but in evaluation a predictor decides token by token",
        choices=["expert-choice", "threshold"],
    )
    mod_weighting: str = flag(
        "sigmoid",
        "sigmoid: what a layer adds to a token is weighted by the router, which learns by that; "
        "none: it is added whole and the router stays as it is",
        choices=["sigmoid", "none"],
    )
    mod_predictor_coeff: float = flag(
        0.01,
        "weight of the predictor's loss in the gradient; it changes nothing but the predictor",
        type=_coefficient,
        metavar="X",
    )

    def is_on(self) -> bool:
        """Whether layers are routed."""
        return self.mod

    def check(self) -> None:
        """See `FlagGroup.check`."""
        CapacitySchedule.parse(self.mod_capacity)

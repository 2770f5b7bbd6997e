"""`--dynmo-early-exit`: tokens that leave the model before its last layer."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from typing import ClassVar

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags import count, flag, number
from megatron_dynmo.flags.group import FlagGroup
from megatron_dynmo.flags.pieces import pieces, require_increasing


@dataclass(frozen=True)
class Schedule:
    """A number that changes linearly between given iterations and is constant outside of them.

    Attributes:
        points: (iteration, value), iterations ascending; at least one.
    """

    points: tuple[tuple[int, float], ...]

    def at(self, iteration: int) -> float:
        """The value in an iteration."""
        for (start, low), (end, high) in itertools.pairwise(self.points):
            if start <= iteration < end:
                return low + (high - low) * (iteration - start) / (end - start)
        return self.points[0][1] if iteration < self.points[0][0] else self.points[-1][1]


def parse_schedule(text: str, name: str) -> Schedule:
    """Parse `VALUE` or `ITER:VALUE;ITER:VALUE...`.

    Args:
        text: values are at least 0; `inf` only where it does not change linearly from or to it.
        name: of the flag, for the error.

    Raises:
        ConfigError: Says what is wrong and gives an example.
    """
    parts = pieces(text)
    is_constant = len(parts) == 1 and ":" not in parts[0]
    points = []
    for piece in parts:
        iteration, _, value = ("1", "", piece) if is_constant else piece.partition(":")
        try:
            points.append((int(iteration), float(value)))
        except ValueError:
            raise ConfigError(
                f"{name}: '{piece}' is no number and no ITER:VALUE, for example '0.9' or "
                "'100:1;500:0.8'"
            ) from None
    if not points or not all(value >= 0 for _, value in points):
        raise ConfigError(f"{name}: '{text}' must hold values of at least 0")
    require_increasing(name, (iteration for iteration, _ in points))
    for (_, low), (_, high) in itertools.pairwise(points):
        if float("inf") in (low, high) and low != high:
            raise ConfigError(
                f"{name}: there is no straight line from {low} to {high}; use a finite value above "
                "1, such as 1.01, for no exits"
            )
    return Schedule(tuple(points))


def _weight(text: str) -> float:
    """Parse the weight of a loss."""
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value


@dataclass(frozen=True)
class EarlyExitFlags(FlagGroup):
    """Flags of early exit."""

    kind: ClassVar[str | None] = "early_exit"

    early_exit: str | None = flag(
        None,
        "tokens leave before the last layer when an exit head is sure of the next token "
        "(confidence) or when a layer hardly turns their hidden state (saturation); later layers "
        "compute the others only",
        choices=["confidence", "saturation"],
    )
    early_exit_threshold: str = flag(
        "",
        "from which confidence or saturation on a token leaves: VALUE, or ITER:VALUE;ITER:VALUE... "
        "with straight lines between (default 0.9 for confidence, 0.99 for saturation); 0: all "
        "leave at once, above 1: none",
        metavar="TEXT",
    )
    early_exit_min_layer: int | None = flag(
        None,
        "first layer after which tokens may leave (default: half of the layers)",
        type=count,
        metavar="N",
    )
    early_exit_every: int = flag(1, "layers from one exit to the next", type=count, metavar="N")
    early_exit_measure: str = flag(
        "probability",
        "what confidence is: the probability of the likeliest class, or the gap to the second",
        choices=["probability", "gap"],
        only_with=("confidence",),
    )
    early_exit_classes: int = flag(
        256,
        "classes that exit heads tell apart: the next token's number modulo this; with the size of "
        "the vocabulary, or more, the next token itself",
        type=count,
        metavar="N",
        only_with=("confidence",),
    )
    early_exit_loss_weight: float = flag(
        0.1,
        "weight of each exit head's loss",
        type=_weight,
        metavar="X",
        only_with=("confidence",),
    )

    def is_on(self) -> bool:
        """Whether tokens may leave."""
        return self.early_exit is not None

    @property
    def early_exit_schedule(self) -> Schedule:
        """The parsed `--dynmo-early-exit-threshold`."""
        default = "0.9" if self.early_exit == "confidence" else "0.99"
        return parse_schedule(self.early_exit_threshold or default, "--dynmo-early-exit-threshold")

    def check(self) -> None:
        """See `FlagGroup.check`."""
        _ = self.early_exit_schedule  # a wrong one is a mistake in a flag
        if not 2 <= self.early_exit_classes <= 256**2:
            raise ConfigError(
                f"--dynmo-early-exit-classes {self.early_exit_classes} must be from 2 to 65536: "
                "a class crosses stage boundaries as at most two bytes"
            )

"""How many hash buckets a layer has after so many iterations, read from text."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.pieces import pieces

DEFAULT_BUCKETS = "4"
_PIECE = re.compile(r"(?:(\d+):)?(\d+)(?:@([\d,-]+))?")
_FLAG = "--dynmo-sparse-attention-buckets"


@dataclass(frozen=True)
class BucketStep:
    """From when on, and where, layers have so many buckets.

    Attributes:
        iteration: completed iterations from which on it holds.
        buckets: at least 1; 1 is dense attention.
        layers: ranges of layer numbers, ends included; empty for all layers.
    """

    iteration: int
    buckets: int
    layers: tuple[tuple[int, int], ...] = ()

    def holds(self, completed: int, layer_number: int) -> bool:
        """Whether it applies to a layer after so many completed iterations."""
        here = not self.layers or any(a <= layer_number <= b for a, b in self.layers)
        return here and self.iteration <= completed


@dataclass(frozen=True)
class BucketSchedule:
    """The number of buckets of every layer over the run.

    Attributes:
        steps: in order of iterations; of those that hold, the last one counts.
    """

    steps: tuple[BucketStep, ...]

    @classmethod
    def parse(cls, text: str) -> BucketSchedule:
        """Read `N` or `ITER:N[@LAYERS][;ITER:N[@LAYERS]...]`.

        Raises:
            ConfigError: Names the piece that is wrong and what would be right.
        """
        steps = tuple(_step(piece) for piece in pieces(text))
        if not steps:
            raise ConfigError(f"{_FLAG} is empty; give a number of buckets, for example 4")
        for earlier, later in itertools.pairwise(steps):
            if later.iteration < earlier.iteration:
                raise ConfigError(
                    f"{_FLAG}: iterations must not decrease, but {later.iteration} follows "
                    f"{earlier.iteration}"
                )
        return cls(steps)

    @property
    def changes(self) -> bool:
        """Whether numbers change while the run goes on."""
        return any(step.iteration > 0 for step in self.steps)

    @property
    def last_layer(self) -> int:
        """The highest layer number that is named; 0 where none is."""
        return max((b for step in self.steps for _, b in step.layers), default=0)

    def touches(self, layer_number: int) -> bool:
        """Whether a layer has more than one bucket at any time."""
        return any(s.buckets > 1 and s.holds(s.iteration, layer_number) for s in self.steps)

    def at(self, completed: int, layer_number: int) -> int:
        """Buckets of a layer after so many completed iterations; 1 where nothing is said."""
        holding = [s.buckets for s in self.steps if s.holds(completed, layer_number)]
        return holding[-1] if holding else 1


def _step(piece: str) -> BucketStep:
    found = _PIECE.fullmatch(piece)
    layers = tuple(_layers(found[3])) if found and found[3] else ()
    if not found or int(found[2]) < 1 or any(not 1 <= a <= b for a, b in layers):
        raise ConfigError(
            f"{_FLAG}: '{piece}' is not ITER:BUCKETS or ITER:BUCKETS@LAYERS with at least 1 "
            "bucket, for example '0:1;100:4;200:8@1-6,9'"
        )
    return BucketStep(int(found[1] or 0), int(found[2]), layers)


def _layers(text: str) -> list[tuple[int, int]]:
    """Read `1-6,9`; a range that is wrong comes back as one that no layer number is in."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        ranges.append((int(ends[0]), int(ends[1])) if all(e.isdigit() for e in ends) else (0, 0))
    return ranges

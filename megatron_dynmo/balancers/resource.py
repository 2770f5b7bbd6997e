"""One quantity that contiguous runs of layers use up on stages, in exact integer arithmetic.

Floats are dyadic rationals, so a list of them is a list of integers times one unit. With integers,
sums and comparisons are exact: two splits whose loads differ in the last bit are told apart, equal
ones are equal, and every rank agrees on every machine.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate

__all__ = ["Resource", "extreme", "to_integers"]


def to_integers(*rows: Sequence[float]) -> tuple[list[list[int]], Fraction]:
    """Write rows of finite numbers as integers times a common unit, exactly.

    Returns:
        (rows of integers, unit): row[k][i] * unit is the original number.
    """
    ratios = [[value.as_integer_ratio() for value in row] for row in rows]
    unit = math.lcm(*{den for row in ratios for _, den in row})
    return [[num * (unit // den) for num, den in row] for row in ratios], Fraction(1, unit)


def extreme(pick: Callable[..., int], levels: Iterable[tuple[int, int]]) -> Fraction:
    """Largest (pick=max) or smallest (pick=min) of levels given as (weight, speed).

    Compares whole numbers of one speed first: building a Fraction for every stage would take most
    of the time of a whole balancing.
    """
    by_speed: dict[int, int] = {}
    for weight, speed in levels:
        by_speed[speed] = pick(by_speed.get(speed, weight), weight)
    return Fraction(pick(Fraction(weight, speed) for speed, weight in by_speed.items()))


class Resource:
    """Use of one quantity (time, bytes) by layers i + 1 .. j on stage s, in integer units.

    weight(s, i, j) = sum of amounts + factors[s] * sum of scaled amounts, plus extras[s], and the
    level of a stage, what is to be small or limited, is its weight divided by speeds[s].

    Args:
        amounts: per layer.
        extras: per stage, whatever its layers.
        speeds: per stage, positive.
        scaled: per layer, counted factors[s] times on stage s (activations in flight).
        factors: per stage.
    """

    def __init__(
        self,
        amounts: Sequence[int],
        extras: Sequence[int],
        speeds: Sequence[int],
        scaled: Sequence[int] | None = None,
        factors: Sequence[int] | None = None,
    ) -> None:
        self.num_layers, self.num_stages = len(amounts), len(extras)
        self.amounts = amounts
        self.prefix = [0, *accumulate(amounts)]
        self.extras, self.speeds = extras, speeds
        self.scaled = None if scaled is None else [0, *accumulate(scaled)]
        self.factors = [0] * len(extras) if factors is None else list(factors)

    def capacities(self, level: Fraction) -> list[int]:
        """Largest weight of layers that each stage may hold at a level; negative for none."""
        num, den = level.numerator, level.denominator
        return [
            num * speed // den - extra
            for speed, extra in zip(self.speeds, self.extras, strict=True)
        ]

    def unlimited(self) -> Fraction:
        """A level that no stage can exceed."""
        everything = self.used_factor(max(self.factors), 0, self.num_layers)
        return Fraction(everything + sum(self.extras), min(self.speeds))

    def lower_bound(self) -> Fraction:
        """A level that some stage must reach, whatever the split."""
        least = min(self.factors)
        everything = self.used_factor(least, 0, self.num_layers) + sum(self.extras)
        heaviest = max(self.amounts, default=0)
        if self.scaled is not None:
            heaviest = max(self.used_factor(least, i, i + 1) for i in range(self.num_layers))
        empty = extreme(max, zip(self.extras, self.speeds, strict=True))
        spread = Fraction(everything, sum(self.speeds))
        return max(spread, Fraction(heaviest, max(self.speeds)), empty)

    def used_factor(self, factor: int, i: int, j: int) -> int:
        """Weight of layers i + 1 .. j, without extras, at a factor."""
        used = self.prefix[j] - self.prefix[i]
        return used if self.scaled is None else used + factor * (self.scaled[j] - self.scaled[i])

    def used(self, stage: int, i: int, j: int) -> int:
        """Weight of layers i + 1 .. j on a stage, without extras."""
        return self.used_factor(self.factors[stage], i, j)

    def loaded(self, stage: int, i: int, j: int) -> tuple[int, int]:
        """Level of a stage that holds layers i + 1 .. j, as (weight, speed)."""
        return self.used(stage, i, j) + self.extras[stage], self.speeds[stage]

    def level(self, stage: int, i: int, j: int) -> Fraction:
        """Level of a stage that holds layers i + 1 .. j."""
        return Fraction(*self.loaded(stage, i, j))

    def peak(self, boundaries: Sequence[int]) -> Fraction:
        """Highest level of any stage."""
        weights = [
            self.used(stage, boundaries[stage], boundaries[stage + 1]) + extra
            for stage, extra in enumerate(self.extras)
        ]
        return extreme(max, zip(weights, self.speeds, strict=True))

    def furthest(self, stage: int, i: int, capacity: int, last: int) -> int:
        """Largest j <= last such that layers i + 1 .. j fit; i - 1 when not even none fit."""
        if self.scaled is None:
            return bisect_right(self.prefix, self.prefix[i] + capacity, i, last + 1) - 1
        at = self._key(stage)
        return bisect_right(range(last + 1), at(i) + capacity, i, last + 1, key=at) - 1

    def earliest(self, stage: int, j: int, capacity: int) -> int:
        """Smallest i such that layers i + 1 .. j fit; j + 1 when not even none fit."""
        if self.scaled is None:
            return bisect_left(self.prefix, self.prefix[j] - capacity, 0, j + 1)
        at = self._key(stage)
        return bisect_left(range(j + 1), at(j) - capacity, 0, j + 1, key=at)

    def _key(self, stage: int) -> Callable[[int], int]:
        prefix, scaled, factor = self.prefix, self.scaled, self.factors[stage]
        assert scaled is not None
        return lambda k: prefix[k] + factor * scaled[k]

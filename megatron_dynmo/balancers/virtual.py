"""Balancing with virtual stages: every rank runs several contiguous chunks of layers.

Chunks follow each other in vp-major order (rank 0, 1, .. P - 1, then rank 0 again), and the time of
a rank is the sum over its chunks. Choosing the cuts so that the slowest rank is as fast as possible
has no known fast exact method, so this is a local search with a proven lower bound: the answer says
how far from the best it can be at most, and often that it is the best.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from megatron_dynmo.balancers.inputs import (
    check_boundaries,
    check_counts,
    edge_row,
    non_negative,
    positive,
)
from megatron_dynmo.balancers.partition import partition
from megatron_dynmo.balancers.resource import to_integers
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.layout import LayerLayout

__all__ = ["VirtualPartition", "partition_virtual"]

_MAX_SHAKES = 300
_SHAKE_BUDGET = (
    40_000  # shakes times chunks times ranks: keeps large cases to a fraction of a second
)


@dataclass(frozen=True)
class VirtualPartition:
    """A split into chunks and what is known of its quality.

    Attributes:
        boundaries: num_stages * virtual_stages + 1 boundaries in vp-major chunk order.
        peak: time of the slowest rank, in the unit of the costs.
        lower_bound: no split has a slowest rank below this.
        optimal: whether the peak is the lower bound.
    """

    boundaries: list[int]
    peak: float
    lower_bound: float
    optimal: bool

    @property
    def gap(self) -> float:
        """How far the peak can be above the best at most: peak / lower_bound - 1."""
        return self.peak / self.lower_bound - 1.0 if self.lower_bound > 0 else 0.0


def partition_virtual(
    layer_costs: Sequence[float],
    num_stages: int,
    virtual_stages: int,
    *,
    first_stage_extra: float = 0.0,
    last_stage_extra: float = 0.0,
    stage_speeds: Sequence[float] | None = None,
    min_layers: int = 1,
    layer_memory: Sequence[float] | None = None,
    stage_memory_limit: float | None = None,
    current: Sequence[int] | None = None,
) -> VirtualPartition:
    """Split layers into chunks so that the slowest rank is as fast as the search can make it.

    Starts from the even split, from the exact split into chunks, and from `current`, and shifts
    runs of neighbouring boundaries by one layer while that relieves the slowest rank.

    Args:
        layer_costs: per layer, in order, at least 0.
        num_stages: pipeline ranks.
        virtual_stages: chunks on each rank; with 1 the answer is `partition`'s, and optimal.
        first_stage_extra: what the first chunk costs besides its layers, on rank 0.
        last_stage_extra: the same for the last chunk, on the last rank.
        stage_speeds: relative speed of each rank.
        min_layers: fewest layers of a chunk.
        layer_memory: bytes of each layer, activations in flight included.
        stage_memory_limit: bytes allowed on each rank.
        current: boundaries in force, kept unless others are better.

    Raises:
        BalanceError: input that makes no sense, or no split found within the memory limit.
    """
    num_chunks = num_stages * virtual_stages
    check_counts(len(layer_costs), num_chunks, min_layers)
    if (layer_memory is None) != (stage_memory_limit is None):
        raise BalanceError("layer_memory and stage_memory_limit only work together")
    edges = edge_row((first_stage_extra, last_stage_extra))
    load, unit = _Load.of_time(layer_costs, edges, stage_speeds, num_stages, num_chunks)
    goal = load.lower_bound()

    def answer(bounds: list[int], bound: Fraction) -> VirtualPartition:
        peak = load.peak(bounds)
        return VirtualPartition(bounds, float(peak * unit), float(bound * unit), peak == bound)

    if virtual_stages == 1:
        exact = partition(
            layer_costs, num_stages, first_stage_extra=first_stage_extra,
            last_stage_extra=last_stage_extra, stage_speeds=stage_speeds, min_layers=min_layers,
            layer_memory=layer_memory, stage_memory_limit=stage_memory_limit, current=current,
        )  # fmt: skip
        return answer(exact, load.peak(exact))
    starts = _starts(layer_costs, num_stages, virtual_stages, min_layers, edges)
    if current is not None:
        bounds = check_boundaries("current boundaries", current, len(layer_costs), num_chunks)
        starts.insert(0, bounds)
    guard = None
    if layer_memory is not None and stage_memory_limit is not None:
        guard = _Guard.of_memory(layer_memory, stage_memory_limit, num_stages, num_chunks)
        starts = guard.within_limit(starts, min_layers)
    # Of equals min takes the first, so the boundaries in force stay unless others are better.
    best = min((_relieve(start, load, guard, min_layers, goal) for start in starts), key=load.peak)
    best = _shake(best, load, guard, min_layers, goal)
    if current is not None and starts[0] == bounds and load.peak(bounds) == load.peak(best):
        best = bounds
    return answer(best, goal)


def _starts(
    layer_costs: Sequence[float],
    num_stages: int,
    virtual_stages: int,
    min_layers: int,
    edges: list[float],
) -> list[list[int]]:
    """Splits to begin from: even by number, and even by chunk time with and without extras."""
    num_chunks = num_stages * virtual_stages
    even = LayerLayout.nearly_even(len(layer_costs), num_stages, virtual_stages=virtual_stages)
    by_time = partition(layer_costs, num_chunks, min_layers=min_layers)
    with_extras = partition(
        layer_costs, num_chunks, min_layers=min_layers,
        first_stage_extra=edges[0], last_stage_extra=edges[1],
    )  # fmt: skip
    return [even.boundaries, by_time, with_extras]


@dataclass(frozen=True)
class _Load:
    """A quantity that chunks, dealt to ranks in turn, add up to on every rank; whole numbers."""

    prefix: list[int]
    extras: list[int]
    speeds: list[int]
    num_chunks: int

    @classmethod
    def of_time(
        cls,
        layer_costs: Sequence[float],
        edges: list[float],
        stage_speeds: Sequence[float] | None,
        num_stages: int,
        num_chunks: int,
    ) -> tuple[_Load, Fraction]:
        """The time of ranks, and what one unit of it is in the unit of the costs."""
        costs = non_negative(layer_costs, "layer_costs", len(layer_costs))
        (amounts, ends), unit = to_integers(costs, edges)
        speeds, speed_unit = [[1] * num_stages], Fraction(1)
        if stage_speeds is not None:
            speeds, speed_unit = to_integers(positive(stage_speeds, "stage_speeds", num_stages))
        extras = [0] * num_stages
        extras[0] += ends[0]
        extras[-1] += ends[1]
        return cls([0, *accumulate(amounts)], extras, speeds[0], num_chunks), unit / speed_unit

    def weights(self, bounds: Sequence[int]) -> list[int]:
        """Sum over the chunks of every rank, extras included."""
        sums = list(self.extras)
        for chunk in range(self.num_chunks):
            sums[chunk % len(sums)] += self.prefix[bounds[chunk + 1]] - self.prefix[bounds[chunk]]
        return sums

    def level(self, rank: int, weight: int) -> Fraction | int:
        """Time of a rank with a weight; whole numbers compare faster."""
        speed = self.speeds[rank]
        return weight if speed == 1 else Fraction(weight, speed)

    def levels(self, bounds: Sequence[int]) -> list[Fraction | int]:
        return [self.level(rank, weight) for rank, weight in enumerate(self.weights(bounds))]

    def peak(self, bounds: Sequence[int]) -> Fraction:
        return Fraction(max(self.levels(bounds)))

    def lower_bound(self) -> Fraction:
        """A time that some rank must reach, whatever the split.

        The mean over the ranks, the heaviest layer, the extras; and since a rank's layers weigh a
        multiple of the common divisor of all layers, the smallest level at which the ranks'
        capacities, rounded down to such multiples, hold everything.
        """
        amounts = [b - a for a, b in pairwise(self.prefix)]
        total, grain = self.prefix[-1], math.gcd(*amounts)
        level = max(
            Fraction(total + sum(self.extras), sum(self.speeds)),
            Fraction(max(amounts, default=0), max(self.speeds)),
            *(Fraction(e, v) for e, v in zip(self.extras, self.speeds, strict=True)),
        )
        while grain:
            held = [
                max(math.floor(level * v) - e, 0) // grain * grain
                for v, e in zip(self.speeds, self.extras, strict=True)
            ]
            if sum(held) >= total:
                break
            level = min(
                Fraction(h + grain + e, v)
                for h, v, e in zip(held, self.speeds, self.extras, strict=True)
            )
        return level


@dataclass(frozen=True)
class _Guard:
    """A limit on what every rank may hold in memory."""

    load: _Load
    limit: int
    unit: Fraction

    @classmethod
    def of_memory(
        cls, layer_memory: Sequence[float], limit: float, num_stages: int, num_chunks: int
    ) -> _Guard:
        (memory, (allowed,)), unit = to_integers(
            non_negative(layer_memory, "layer_memory", len(layer_memory)),
            positive([limit], "stage_memory_limit", 1),
        )
        flat = [0] * num_stages, [1] * num_stages
        return cls(_Load([0, *accumulate(memory)], *flat, num_chunks), allowed, unit)

    def within_limit(self, starts: list[list[int]], min_layers: int) -> list[list[int]]:
        """Starts shifted until they fit; those that cannot be made to fit are dropped.

        Raises:
            BalanceError: none is left.
        """
        goal = Fraction(self.limit)
        shifted = [_relieve(start, self.load, None, min_layers, goal) for start in starts]
        fitting = [bounds for bounds in shifted if self.load.peak(bounds) <= goal]
        if fitting:
            return fitting
        best = min(shifted, key=self.load.peak)
        held = self.load.weights(best)
        needed = math.ceil(max(held) * self.unit)
        raise BalanceError(
            f"found no split that fits in memory: in the best one rank {held.index(max(held))} "
            f"needs {needed:,} bytes, allowed are {math.floor(self.limit * self.unit):,}; allow "
            f"{needed:,} or use more stages"
        )


def _relieve(
    start: Sequence[int], load: _Load, guard: _Guard | None, min_layers: int, goal: Fraction
) -> list[int]:
    """Shift runs of boundaries by one layer while that relieves a slowest rank.

    A shift is taken when it lowers a rank at the peak and leaves every rank that it touches below
    the peak: so the times, sorted from the largest down, fall in lexicographic order, and it ends.
    """
    bounds = list(start)
    while load.peak(bounds) > goal:
        best = _best_shift(bounds, load, guard, min_layers)
        if best is None:
            break
        step, first, last = best
        for boundary in range(first, last + 1):
            bounds[boundary] += step
    return bounds


def _shake(
    best: list[int], load: _Load, guard: _Guard | None, min_layers: int, goal: Fraction
) -> list[int]:
    """Leave a dead end: shift some boundaries at random, relieve again, keep what is no worse.

    The random numbers have a fixed seed, so every rank comes to the same answer.
    """
    shakes = min(_MAX_SHAKES, _SHAKE_BUDGET // (load.num_chunks * len(load.speeds)))
    numbers = random.Random(0)
    at, peak = best, load.peak(best)
    for _ in range(shakes):
        if peak <= goal:
            break
        other = list(at)
        for _ in range(numbers.randint(1, 4)):
            other[numbers.randrange(1, load.num_chunks)] += numbers.choice((-1, 1))
        if any(b - a < min_layers for a, b in pairwise(other)):
            continue
        if guard is not None and guard.load.peak(other) > guard.limit:
            continue
        other = _relieve(other, load, guard, min_layers, goal)
        if load.peak(other) <= peak:
            at = other
        if load.peak(other) < peak:
            best, peak = other, load.peak(other)
    return best


def _best_shift(
    bounds: list[int], load: _Load, guard: _Guard | None, min_layers: int
) -> tuple[int, int, int] | None:
    """(step, first, last): the run of boundaries whose shift leaves its ranks lowest."""
    num_ranks, num_chunks = len(load.speeds), load.num_chunks
    weights, levels = load.weights(bounds), load.levels(bounds)
    room = None if guard is None else [guard.limit - held for held in guard.load.weights(bounds)]
    peak = max(levels)
    best, best_level = None, peak
    for step in (1, -1):
        for first in range(1, num_chunks):
            settled: Fraction | int = 0
            relieves, carried, carried_memory = False, 0, 0
            # Fewer boundaries than ranks, so that no rank is touched by both ends of the run.
            for last in range(first, min(first + num_ranks - 1, num_chunks)):
                layer = bounds[last] if step > 0 else bounds[last] - 1
                if not 0 <= layer < bounds[-1]:
                    break
                left, right = (last - 1) % num_ranks, last % num_ranks
                # The layer goes from the right chunk to the left one, or back when step is -1.
                moved = step * (load.prefix[layer + 1] - load.prefix[layer])
                level = load.level(left, weights[left] - carried + moved)
                if level >= peak:
                    break
                if guard is not None and room is not None:
                    size = step * (guard.load.prefix[layer + 1] - guard.load.prefix[layer])
                    if size - carried_memory > room[left]:
                        break
                    carried_memory = size
                settled = max(settled, level)
                relieves |= levels[left] == peak
                carried = moved
                end = load.level(right, weights[right] - moved)
                fits = room is None or -carried_memory <= room[right]
                # Only the outer chunks change their number of layers.
                taken = first - 1 if step < 0 else last
                enough = bounds[taken + 1] - bounds[taken] > min_layers
                if fits and enough and (relieves or levels[right] == peak):
                    reached = max(settled, end)
                    if reached < best_level:
                        best, best_level = (step, first, last), reached
    return best

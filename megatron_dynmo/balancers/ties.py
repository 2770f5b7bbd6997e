"""Choosing among splits that are equally good: least moved, then least memory, then most even.

All of this happens within limits that fix what has been decided so far.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from megatron_dynmo.balancers.minmax import Limit, feasible_bands, minimise
from megatron_dynmo.balancers.resource import Resource

__all__ = ["Retention", "keep_most", "keep_most_then_least_memory", "nearest_to", "spread_evenly"]

_MAX_PLACES = 2_000_000  # beyond this many candidate places, follow the current layout greedily


class Retention:
    """How much stays where it is when boundaries change from the current ones.

    Args:
        current: boundaries now, num_stages + 1.
        sizes: what moving each layer costs, integers (bytes, or 1 a layer).
    """

    def __init__(self, current: Sequence[int], sizes: Sequence[int]) -> None:
        self.current = current
        self.prefix = [0, *accumulate(sizes)]

    def clamped(self, stage: int, place: int) -> int:
        """Size of what the stage holds now before a place; kept(i, j) is a difference of two."""
        return self.prefix[min(max(place, self.current[stage]), self.current[stage + 1])]

    def kept(self, boundaries: Sequence[int]) -> int:
        """Size of the layers that stay on their stage."""
        return sum(
            self.clamped(s, boundaries[s + 1]) - self.clamped(s, boundaries[s])
            for s in range(len(self.current) - 1)
        )


def keep_most(limits: Sequence[Limit], min_layers: int, retention: Retention) -> list[int] | None:
    """The split within limits that moves least; None when there is none within limits.

    Dynamic programming over the places that boundaries can have. What stage s keeps of layers
    i + 1 .. j is a function of j minus a function of i, so the best i for every j is a sliding
    maximum, and the whole costs the number of candidate places.
    """
    bands = feasible_bands(limits, min_layers)
    if not bands.possible:
        return None
    lowest, highest = bands.lowest, bands.highest
    if sum(high - low + 1 for low, high in zip(lowest, highest, strict=True)) > _MAX_PLACES:
        return nearest_to(limits, min_layers, retention.current)
    best: dict[int, int] = {0: 0}
    choices: list[dict[int, int]] = []
    for stage in range(limits[0].resource.num_stages):
        following: dict[int, int] = {}
        choice: dict[int, int] = {}
        window: deque[tuple[int, int]] = deque()  # (value, i), value falling
        entering = lowest[stage]
        for j in range(lowest[stage + 1], highest[stage + 1] + 1):
            while entering <= min(j - min_layers, highest[stage]):
                if entering in best:
                    value = best[entering] - retention.clamped(stage, entering)
                    while window and window[-1][0] <= value:
                        window.pop()
                    window.append((value, entering))
                entering += 1
            # Starts too far left to fit stay too far left for every later j.
            while window and not all(limit.allows(stage, window[0][1], j) for limit in limits):
                window.popleft()
            if window:
                following[j] = window[0][0] + retention.clamped(stage, j)
                choice[j] = window[0][1]
        best = following
        choices.append(choice)
    return _follow(choices, limits[0].resource.num_layers)


def _follow(choices: Sequence[dict[int, int]], num_layers: int) -> list[int] | None:
    """Read the boundaries back from the last one."""
    if num_layers not in choices[-1]:
        return None
    boundaries = [num_layers]
    for choice in reversed(choices):
        boundaries.append(choice[boundaries[-1]])
    return boundaries[::-1]


def keep_most_then_least_memory(
    limits: Sequence[Limit], min_layers: int, retention: Retention, memory: Resource
) -> list[int] | None:
    """Among the splits that move least, one with the smallest peak memory."""
    best = keep_most(limits, min_layers, retention)
    smallest = minimise(memory, limits, min_layers)
    if best is None or smallest is None:
        return best
    kept, low, high = retention.kept(best), smallest[0], memory.peak(best)
    while low < high:
        # Memory is a whole number of units on stages of speed 1.
        middle = Fraction((low + high) // 2)
        other = keep_most([*limits, Limit.at(memory, middle)], min_layers, retention)
        if other is not None and retention.kept(other) == kept:
            best, high = other, memory.peak(other)
        else:
            low = middle + 1
    return best


def spread_evenly(
    limits: Sequence[Limit], min_layers: int, resource: Resource, fallback: list[int]
) -> list[int]:
    """Among splits within limits one whose boundaries lie near equal shares of the resource.

    Without it the first stages would be filled to the limit and the last left nearly empty.
    """
    prefix, num_layers = resource.prefix, resource.num_layers
    total, all_speeds = prefix[-1] + sum(resource.extras), sum(resource.speeds)
    targets, speeds_so_far, extras_so_far = [0], 0, 0
    for speed, extra in zip(resource.speeds, resource.extras, strict=True):
        speeds_so_far += speed
        extras_so_far += extra
        goal = total * speeds_so_far // all_speeds - extras_so_far
        right = min(bisect_left(prefix, goal), num_layers)
        left = max(right - 1, 0)
        targets.append(right if prefix[right] - goal <= goal - prefix[left] else left)
    return nearest_to(limits, min_layers, targets) or fallback


def nearest_to(
    limits: Sequence[Limit], min_layers: int, targets: Sequence[int]
) -> list[int] | None:
    """Put every boundary as near its target as those before it and the limits behind it allow.

    Returns:
        Boundaries within the limits; None where min_layers cannot be kept this way.
    """
    bands = feasible_bands(limits, min_layers)
    if not bands.possible:
        return None
    boundaries = [0]
    for stage in range(limits[0].resource.num_stages):
        i = boundaries[-1]
        low = max(i + min_layers, bands.lowest[stage + 1])
        high = bands.highest[stage + 1]
        for limit in limits:
            high = min(high, limit.resource.furthest(stage, i, limit.capacities[stage], high))
        if low > high:
            return None
        boundaries.append(min(max(targets[stage + 1], low), high))
    return boundaries

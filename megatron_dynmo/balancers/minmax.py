"""Exact min-max split of a chain of layers over a chain of stages.

The largest stage level of any split is one of the achievable stage sums. The search keeps a level
below which nothing is possible and one that a known split reaches, probes between them, and snaps
both to achievable sums: a split that was found gives its own largest sum, a failed probe gives the
smallest sum that would have changed any of its steps. It ends when both meet, at the optimum.

Source: Pinar and Aykanat, Fast optimal load balancing algorithms for 1D partitioning, J. Parallel
Distrib. Comput. 64 (2004), exact bisection; Pinar, Tabak and Aykanat, One-dimensional partitioning
for heterogeneous systems, J. Parallel Distrib. Comput. 68 (2008), stages of unequal speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_dynmo.balancers.resource import Resource, extreme

__all__ = ["Bands", "Limit", "Probe", "feasible_bands", "minimise", "probe"]


@dataclass(frozen=True)
class Limit:
    """A resource that no stage may use beyond its capacity (integer weight without extras)."""

    resource: Resource
    capacities: list[int]

    @classmethod
    def at(cls, resource: Resource, level: Fraction) -> Limit:
        """Every stage at most at a level."""
        return cls(resource, resource.capacities(level))

    def allows(self, stage: int, i: int, j: int) -> bool:
        """Whether the stage may hold layers i + 1 .. j."""
        return self.resource.used(stage, i, j) <= self.capacities[stage]


@dataclass(frozen=True)
class Probe:
    """Answer to: is there a split within the limits?

    Attributes:
        boundaries: one such split, or None.
        next_level: without one, a level of the first limit's resource below which there is still
            none; None when no level would help.
    """

    boundaries: list[int] | None
    next_level: Fraction | None = None


def minimise(
    resource: Resource, limits: Sequence[Limit], min_layers: int
) -> tuple[Fraction, list[int]] | None:
    """Smallest possible highest level of a resource, and a split that has it.

    Args:
        resource: what to balance.
        limits: other resources to respect.
        min_layers: fewest layers of a stage; num_stages * min_layers <= num_layers.

    Returns:
        (level, boundaries); None when the limits cannot be met at any level.
    """

    def at(level: Fraction) -> Probe:
        return probe([Limit.at(resource, level), *limits], min_layers)

    if limits and at(resource.unlimited()).boundaries is None:
        return None
    low = resource.lower_bound()
    best = at(low)
    step = max(low / 8, Fraction(1, min(resource.speeds)))
    while best.boundaries is None:
        # Climb in growing steps; a failed probe already says how far to climb at least.
        assert best.next_level is not None and best.next_level > low
        low = best.next_level
        level, step = low + step, 2 * step
        best = at(level)
    high, boundaries = resource.peak(best.boundaries), best.boundaries
    while low < high:
        between = at((low + high) / 2)
        if between.boundaries is not None:
            high, boundaries = resource.peak(between.boundaries), between.boundaries
        else:
            assert between.next_level is not None and between.next_level > low
            low = between.next_level
    return high, boundaries


def probe(limits: Sequence[Limit], min_layers: int) -> Probe:
    """Find a split within limits by giving every stage, in order, as many layers as it may have.

    That is conclusive unless a stage cannot take min_layers layers from where the ones before it
    left off, though it could from further left; then all starting points are tried.
    """
    resource, capacities = limits[0].resource, limits[0].capacities
    num_layers, num_stages = resource.num_layers, resource.num_stages
    levels: list[tuple[int, int]] = []
    boundaries, i = [0], 0
    last = num_layers - min_layers * num_stages
    for stage in range(num_stages):
        last += min_layers
        j = resource.furthest(stage, i, capacities[stage], last)
        bound_by_first = j < last
        for limit in limits[1:]:
            k = limit.resource.furthest(stage, i, limit.capacities[stage], last)
            if k < j:
                j, bound_by_first = k, False
        if bound_by_first:
            levels.append(resource.loaded(stage, i, j + 1))
        if j < i + min_layers:
            if min_layers == 0:
                break
            return _probe_every_start(limits, min_layers)
        boundaries.append(j)
        i = j
    if i == num_layers and len(boundaries) == num_stages + 1:
        return Probe(boundaries)
    return _none_below(levels)


def _none_below(levels: list[tuple[int, int]]) -> Probe:
    """No split, and none at any level below those at which a step of the search would change."""
    return Probe(None, extreme(min, levels) if levels else None)


@dataclass(frozen=True)
class Bands:
    """Where boundaries can lie within limits: bounds, not a promise.

    min_layers is respected only in the number of layers before and behind a boundary.

    Attributes:
        lowest: num_stages + 1 places; meaningless unless possible.
        highest: the same.
        possible: False when the limits cannot be met.
        levels: (weight, speed) of the first limit's resource at which a bound would change.
    """

    lowest: list[int]
    highest: list[int]
    possible: bool
    levels: list[tuple[int, int]]


def feasible_bands(limits: Sequence[Limit], min_layers: int) -> Bands:
    """Sweep forward as far as possible for the highest places, backward for the lowest."""
    first = limits[0].resource
    num_layers, num_stages = first.num_layers, first.num_stages
    lowest, highest, levels = [num_layers], [0], list[tuple[int, int]]()
    for stage in range(num_stages):
        i, last = highest[stage], num_layers - min_layers * (num_stages - 1 - stage)
        reach = [
            limit.resource.furthest(stage, i, limit.capacities[stage], last) for limit in limits
        ]
        highest.append(min(reach))
        if reach[0] == highest[-1] < last:
            levels.append(first.loaded(stage, i, reach[0] + 1))
        if highest[-1] < i:
            return Bands(lowest, highest, False, levels)
    for stage in reversed(range(num_stages)):
        j = lowest[0]
        back = [limit.resource.earliest(stage, j, limit.capacities[stage]) for limit in limits]
        lowest.insert(0, max(*back, min_layers * stage))
        if back[0] == lowest[0] > min_layers * stage:
            levels.append(first.loaded(stage, back[0] - 1, j))
        if lowest[0] > j:
            return Bands(lowest, highest, False, levels)
    possible = all(low <= high for low, high in zip(lowest, highest, strict=True))
    return Bands(lowest, highest, possible, levels)


def _probe_every_start(limits: Sequence[Limit], min_layers: int) -> Probe:
    """The complete probe: follow every place a boundary can have, within its band."""
    first = limits[0].resource
    num_layers, num_stages = first.num_layers, first.num_stages
    bands = feasible_bands(limits, min_layers)
    lowest, highest, levels = bands.lowest, bands.highest, bands.levels
    if not bands.possible:
        return _none_below(levels)
    starts = [[0]]
    for stage in range(num_stages):
        last = num_layers - min_layers * (num_stages - 1 - stage)
        reached, ends = -1, list[int]()
        for i in starts[-1]:
            reach = [
                limit.resource.furthest(stage, i, limit.capacities[stage], last) for limit in limits
            ]
            j = min(reach)
            if reach[0] == j < last:
                levels.append(first.loaded(stage, i, j + 1))
            # Both i and its reach grow along the loop, so the places reached come in order.
            begin = max(i + min_layers, lowest[stage + 1], reached + 1)
            end = min(j, highest[stage + 1])
            ends.extend(range(begin, end + 1))
            reached = max(reached, end)
        starts.append(ends)
    if num_layers not in starts[-1]:
        return _none_below(levels)
    boundaries = [num_layers]
    for stage in reversed(range(num_stages)):
        # The latest start leaves the fewest layers to this stage, so if any fits, it does.
        j = boundaries[0]
        boundaries.insert(0, max(i for i in starts[stage] if i + min_layers <= j))
    return Probe(boundaries)

"""Improving a split by its iteration time: runs of boundaries, one layer at a time. Tier: pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOTICEABLE", "Boundaries", "Budget", "Splits", "climb"]

type Boundaries = tuple[int, ...]
type Splits = NDArray[np.intp]
"""[splits, chunks + 1], boundaries of one split in each row."""

NOTICEABLE = 1e-9  # relative: below this, differences are rounding
_MAX_NEIGHBOURS = 4096  # of one step; with many stages only short runs of boundaries are tried


class Budget:
    """How much timing may still be done. Counted, not by the clock: all ranks stop alike.

    Args:
        work: to spend.
        work_of: what timing so many splits in one call takes; one each if None.
    """

    def __init__(self, work: float, work_of: Callable[[int], float] | None = None) -> None:
        self._left = work
        self._work_of = work_of or float

    def take(self, num_splits: int) -> bool:
        """Spend what so many splits take; False, and nothing spent, if that is more than left."""
        work = self._work_of(num_splits)
        if work > self._left:
            return False
        self._left -= work
        return True


def climb(
    start: Boundaries,
    time_of: Callable[[Splits], NDArray[np.float64]],
    budget: Budget,
    *,
    start_time: float | None = None,
    at_least: Callable[[Splits], NDArray[np.float64]] | None = None,
    allows: Callable[[Splits], NDArray[np.bool_]] | None = None,
    min_layers: int = 0,
) -> tuple[Boundaries, float]:
    """Steepest descent: take the best neighbour as long as it is faster.

    Args:
        start: where it begins.
        time_of: times of several splits, in any unit.
        budget: for timing neighbours.
        start_time: of the start, if it is known; timing it is not counted.
        at_least: a lower bound of `time_of` that is cheap; a neighbour that it shows to be no
            faster is not timed, which changes nothing in the result.
        allows: which neighbours may be taken; all if None.
        min_layers: fewest layers of a chunk.

    Returns:
        The split at which it ended and its time, never more than the start's.
    """
    best = start
    best_time = float(time_of(np.array([start]))[0]) if start_time is None else start_time
    while True:
        goal = best_time * (1 - NOTICEABLE)
        near = _neighbours(best, min_layers)
        if at_least is not None and len(near):
            near = near[at_least(near) < goal]
        if allows is not None and len(near):
            near = near[allows(near)]
        if not len(near) or not budget.take(len(near)):
            return best, best_time
        times = time_of(near)
        # The first of those that are equal but for rounding.
        k = int(np.argmax(times <= times.min() * (1 + NOTICEABLE)))
        if times[k] >= goal:
            return best, best_time
        best, best_time = tuple(near[k].tolist()), float(times[k])


def _neighbours(boundaries: Boundaries, min_layers: int) -> Splits:
    """Splits in which one boundary, or a run of adjacent ones, moves by one layer.

    A run hands a layer from its one end to its other through all stages between, which no sequence
    of single moves reaches when each of them alone makes things worse.
    """
    bounds = np.array(boundaries, dtype=np.intp)
    inner = len(bounds) - 2
    longest = max(1, min(inner, _MAX_NEIGHBOURS // (2 * max(inner, 1))))
    # Short runs come first, so that of equals the one that moves fewest layers is taken.
    length, first = np.meshgrid(np.arange(1, longest + 1), np.arange(1, inner + 1), indexing="ij")
    is_inside = first + length <= inner + 1
    begin, end = np.repeat(first[is_inside], 2), np.repeat((first + length)[is_inside], 2)
    steps = np.tile([-1, 1], len(begin) // 2)
    columns = np.arange(len(bounds))
    is_moved = (columns >= begin[:, None]) & (columns < end[:, None])
    splits = bounds + is_moved * steps[:, None]
    near: Splits = splits[(np.diff(splits, axis=1) >= min_layers).all(axis=1)]
    return near

"""Improving a split by its iteration time: single boundaries, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.simulate.pipeline import Boundaries

__all__ = ["climb"]

_NOTICEABLE = 1e-9  # relative: below this, differences are rounding


def climb(
    start: Boundaries,
    time_of: Callable[[Sequence[Boundaries]], NDArray[np.float64]],
    budget: int,
) -> Boundaries:
    """Steepest descent: take the best neighbour as long as it is faster.

    Args:
        start: where it begins; the result is never slower.
        time_of: [splits] times of several splits, in any unit.
        budget: splits that may be timed.
    """
    best, best_time = start, float(time_of([start])[0])
    while True:
        near = [
            (*best[:k], best[k] + step, *best[k + 1 :])
            for k in range(1, len(best) - 1)
            for step in (-1, 1)
            if best[k - 1] <= best[k] + step <= best[k + 1]
        ]
        budget -= len(near)
        if not near or budget < 0:
            return best
        times = time_of(near)
        k = int(np.argmin(times))
        if times[k] >= best_time * (1 - _NOTICEABLE):
            return best
        best, best_time = near[k], float(times[k])

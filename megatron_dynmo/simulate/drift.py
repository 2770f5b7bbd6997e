"""How things change over a run: steps, ramps, and values that wander around their mean."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["changes", "drift", "ramp", "steps_done"]


def steps_done(num_iterations: int, begin: float, end: float, num_steps: int) -> NDArray[np.intp]:
    """How far a schedule of steps 0..num_steps, evenly spaced from begin to end, is.

    Args:
        num_iterations: iterations of the run.
        begin: share of the run at which step 0 is taken.
        end: share at which step num_steps is taken; the last iteration at the latest.
        num_steps: steps after step 0.

    Returns:
        [num_iterations]: 0 before step 0, k + 1 from step k on.
    """
    moments = begin + (end - begin) * np.arange(num_steps + 1) / num_steps
    first = np.minimum(np.ceil(moments * num_iterations - 1e-9), num_iterations - 1)
    done: NDArray[np.intp] = np.searchsorted(first, np.arange(num_iterations), side="right")
    return done


def changes(done: NDArray[np.intp]) -> tuple[int, ...]:
    """Rows at which a schedule takes a step, from what `steps_done` returned."""
    return tuple((np.flatnonzero(np.diff(done)) + 1).tolist())


def ramp(num_iterations: int, begin: float, end: float) -> NDArray[np.float64]:
    """A straight line from 0 at `begin` to 1 at `end` (shares of the run), flat outside."""
    at = np.arange(num_iterations) / max(num_iterations - 1, 1)
    if end <= begin:
        return (at >= begin).astype(np.float64)
    return np.clip((at - begin) / (end - begin), 0.0, 1.0)


def drift(num_iterations: int, width: int, correlation: float, seed: int) -> NDArray[np.float64]:
    """Independent standard normal values that forget where they were.

    x[t + 1] = k x[t] + sqrt(1 - k^2) e[t], k = exp(-1 / correlation): mean 0, variance 1 always.

    Returns:
        [num_iterations, width].
    """
    rng = np.random.default_rng(seed)
    keep = math.exp(-1.0 / correlation)
    walk = rng.standard_normal((num_iterations, width))
    walk[1:] *= math.sqrt(1.0 - keep * keep)
    for t in range(1, num_iterations):
        walk[t] += keep * walk[t - 1]
    return walk

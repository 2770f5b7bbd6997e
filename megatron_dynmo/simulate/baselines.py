"""Splits that others use: DeepSpeed's, the paper's diffusion, and the best one static run can have.

Written from their published descriptions; they are what we compare with, not what we use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_dynmo.balancers.climb import Budget, Splits, climb
from megatron_dynmo.balancers.partition import partition
from megatron_dynmo.simulate.pipeline import Boundaries, Case

__all__ = ["best_static", "deepspeed_split", "paper_diffusion"]

type Array = NDArray[np.float64]

_SAMPLED_PASSES = (
    400_000_000  # forwards and backwards timed while looking for the best static split
)


def deepspeed_split(weights: ArrayLike, num_parts: int, *, tolerance: float = 1e-3) -> Boundaries:
    """Split a chain by bisecting on the heaviest part, as DeepSpeed's pipeline module does.

    A bottleneck is tried by filling the parts from the front, each as full as it may be; the
    smallest one that works is bisected to within a tolerance. So the result is near the optimum,
    not always at it, and the last parts can be left empty.

    Args:
        weights: of each layer.
        num_parts: stages, or chunks.
        tolerance: where the bisection stops, as a share of the mean weight of a part.

    Returns:
        num_parts + 1 boundaries.
    """
    sums = [0.0, *np.cumsum(np.asarray(weights, dtype=np.float64)).tolist()]
    low, high = sums[-1] / num_parts, sums[-1]
    best = _fill(sums, num_parts, high)
    assert best is not None, "everything fits into one part"
    while high - low > tolerance * sums[-1] / num_parts:
        middle = (low + high) / 2
        found = _fill(sums, num_parts, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _fill(sums: Sequence[float], num_parts: int, bottleneck: float) -> Boundaries | None:
    """Fill the parts from the front; None if layers are left over."""
    bounds = [0]
    for _ in range(num_parts):
        bounds.append(bisect_right(sums, sums[bounds[-1]] + bottleneck, bounds[-1]) - 1)
    return tuple(bounds) if bounds[-1] == len(sums) - 1 else None


def paper_diffusion(
    weights: ArrayLike, boundaries: Sequence[int], *, gamma: float = 0.05, max_rounds: int = 1000
) -> Boundaries:
    """Decentralised diffusion as the paper describes it, with the order of layers kept.

    In a round every pair of neighbours, even boundaries first and then odd ones, compares loads;
    the heavier one hands the layer at the boundary over if that leaves the other lighter than it
    was itself. It ends when the heaviest stage is within gamma of the mean, when nobody hands
    anything over, or after max_rounds.

    Args:
        weights: of each layer, extras included in the first and the last.
        boundaries: where it begins.
        gamma: tolerated imbalance, max / mean - 1.
        max_rounds: rounds at most.
    """
    cost = np.asarray(weights, dtype=np.float64)
    sums = np.concatenate([[0.0], np.cumsum(cost)])
    bounds = np.array(boundaries, dtype=np.intp)
    num_stages = len(bounds) - 1
    for _ in range(max_rounds):
        loads = np.diff(sums[bounds])
        if loads.max() <= (1.0 + gamma) * sums[-1] / num_stages:
            break
        before = bounds.copy()
        for parity in (1, 2):
            _hand_over(cost, sums, bounds, np.arange(parity, num_stages, 2))
        if np.array_equal(before, bounds):
            break
    return tuple(bounds.tolist())


def _hand_over(cost: Array, sums: Array, bounds: NDArray[np.intp], at: NDArray[np.intp]) -> None:
    """Shift each of these boundaries, no two of them neighbours, by a layer where it helps."""
    left, right = sums[bounds[at]] - sums[bounds[at - 1]], sums[bounds[at + 1]] - sums[bounds[at]]
    # Layers on either side of the boundary; of an empty stage there is none to give.
    last_left = cost[np.maximum(bounds[at] - 1, 0)]
    first_right = cost[np.minimum(bounds[at], len(cost) - 1)]
    to_right = (left > right) & (bounds[at] > bounds[at - 1]) & (right + last_left < left)
    to_left = (right > left) & (bounds[at + 1] > bounds[at]) & (left + first_right < right)
    bounds[at] += to_left.astype(np.intp) - to_right.astype(np.intp)


def best_static(case: Case, others: Sequence[Boundaries] = ()) -> Boundaries:
    """The best split found that a run which never moves could have used, known in hindsight.

    Candidates are exact min-max splits of the mean costs and of the costs at moments of the run,
    and `others`. The best one on a sample of iterations is improved by shifting single boundaries
    as long as that helps, and is compared with `others` over the whole run: it is never worse.
    """
    trace, p = case.trace, case.pipeline
    total = trace.forward_ms + trace.backward_ms
    extra = trace.extra_forward_ms + trace.extra_backward_ms
    passes = 2 * p.num_microbatches * p.num_chunks
    budget = max(_SAMPLED_PASSES // passes, 64)  # iterations that may be timed
    rows = _spread(trace.num_iterations, min(64, max(8, budget // 16)))
    moments = _spread(trace.num_iterations, max(2, min(32, budget // (2 * len(rows)))))
    weights = [(total.mean(axis=0), extra.mean(axis=0)), *((total[i], extra[i]) for i in moments)]
    candidates = {
        tuple(
            partition(
                layers,
                p.num_chunks,
                first_stage_extra=edges[0],
                last_stage_extra=edges[1],
                min_layers=0,
            )
        )
        for layers, edges in weights
    }
    ordered = [*others, *sorted(candidates - set(others))]
    best = ordered[int(np.argmin(_sampled(case, ordered, rows)))]
    timings = Budget(budget // len(rows))
    best, _ = climb(best, lambda splits: _sampled(case, splits, rows), timings)
    finalists = [*others, best]
    totals = [float(case.iteration_ms(bounds, slice(None)).sum()) for bounds in finalists]
    return finalists[int(np.argmin(totals))]


def _sampled(case: Case, splits: Sequence[Boundaries] | Splits, rows: NDArray[np.intp]) -> Array:
    """[splits] time of these iterations under each split, added up."""
    times = [case.chunk_times(bounds, rows) for bounds in splits]
    forward = np.concatenate([forward for forward, _ in times])
    backward = np.concatenate([backward for _, backward in times])
    result: Array = case.makespans(forward, backward).reshape(len(splits), -1).sum(axis=1)
    return result


def _spread(num_iterations: int, count: int) -> NDArray[np.intp]:
    """Rows in the middle of `count` equal parts of the run; fewer where the run is short."""
    count = min(count, num_iterations)
    return ((np.arange(count) + 0.5) * num_iterations / count).astype(np.intp)

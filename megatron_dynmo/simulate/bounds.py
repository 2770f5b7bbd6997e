"""How fast a pipeline could be at best: perfect balance, no cost of moving."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.simulate.pipeline import Pipeline
from megatron_dynmo.simulate.trace import CostTrace

__all__ = ["balanced_ms", "ideal_ms"]

type Array = NDArray[np.float64]

_BISECTIONS = 60  # halve the gap until nothing of a double is left


def balanced_ms(trace: CostTrace, pipeline: Pipeline) -> Array:
    """[iterations] with the same time on every stage: (M + (P - 1) / V)(f + b) and its hops.

    The usual yardstick. Where micro-batches are few, 1F1B can beat it: a stage near the front
    begins first and ends last, so it has room for more work than a later one.
    """
    p, work = pipeline, _work_ms(trace)
    turns = p.num_microbatches + (p.num_stages - 1) / p.virtual_stages
    return turns * work / p.num_stages + _hops_ms(p)


def ideal_ms(trace: CostTrace, pipeline: Pipeline) -> Array:
    """[iterations] that no split of the layers, even into fractions, can be faster than.

    For 1F1B two kinds of path through the schedule are long whatever the split. With g the time
    of a micro-batch on a stage (forward and backward), G the sum over stages and p a hop:

    - stage s computes M g_s, after the forwards and before the backwards of the stages in front:
      T >= sum of g in front of s + M g_s + 2 s p;
    - the first micro-batch runs down to the last stage and back up to s, which then has M - P + s
      whole turns left and P - 1 - s backwards of the cool-down (or, mirrored, forwards of the
      warm-up; the mean of both paths counts half of g_s for each), if M >= P:
      T >= G + (M - 1 - (P - 1 - s) / 2) g_s + 2 (P - 1) p.

    T is too small if stages as heavy as both allow cannot hold G together. Taking the most in
    front is best, because it costs those behind less than it holds. The smallest T is bisected.
    GPipe reaches its bound when balanced; for interleaved schedules, whose chunks may have any
    size, the bound is the larger of an equal share of the work and one micro-batch's way.
    """
    p, work = pipeline, _work_ms(trace)
    if p.schedule == "gpipe" or p.num_stages == 1:
        return balanced_ms(trace, p)
    way = work + _hops_ms(p)
    if p.virtual_stages > 1:
        return np.maximum(p.num_microbatches * work / p.num_stages, way)
    distinct, where = np.unique(work, return_inverse=True)
    low = np.maximum(p.num_microbatches * distinct / p.num_stages, distinct + _hops_ms(p))
    high = (p.num_microbatches + p.num_stages - 1) * distinct / p.num_stages + _hops_ms(p)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        enough = _most_work(middle, distinct, p) >= distinct
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    ideal: Array = low[where]
    return ideal


def _most_work(limit_ms: Array, work: Array, p: Pipeline) -> Array:
    """[rows] the most work that all stages together may hold within a time."""
    in_front = np.zeros(len(limit_ms))
    for stage in range(p.num_stages):
        most = (limit_ms - in_front - 2 * stage * p.p2p_ms) / p.num_microbatches
        turns = p.num_microbatches - 1 - (p.num_stages - 1 - stage) / 2
        if p.num_microbatches >= p.num_stages and turns > 0:
            after_first = limit_ms - work - 2 * (p.num_stages - 1) * p.p2p_ms
            most = np.minimum(most, after_first / turns)
        in_front += np.maximum(most, 0.0)
    return in_front


def _work_ms(trace: CostTrace) -> Array:
    """[iterations] forward and backward of one micro-batch through the whole model."""
    layers = trace.forward_ms.sum(axis=1) + trace.backward_ms.sum(axis=1)
    extras = trace.extra_forward_ms.sum(axis=1) + trace.extra_backward_ms.sum(axis=1)
    work: Array = layers + extras
    return work


def _hops_ms(p: Pipeline) -> float:
    """Hops of the one micro-batch that nothing hides: down the pipeline and back."""
    return 2 * (p.num_chunks - 1) * p.p2p_ms

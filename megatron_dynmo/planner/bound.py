"""Times that no split into whole layers can beat.

Proof for one chunk a rank (1F1B), with T the time of one micro-batch through all stages, M
micro-batches, and a stage r of forward f and backward b that has D of T behind it and U before it.
Its first forward cannot start before U's forwards are done and after its last backward U's
backwards follow. It runs w = min(M, P - r) forwards before its first backward, which cannot start
before D has answered the first of them. So the iteration takes at least

    U + M (f + b) + max(0, D - (w - 1) f)

for every r. This grows with the layers of stage r and falls with D, so a split that stays below a
given time exists exactly if filling stages from the last to the first, each as far as it goes,
places every layer: a bisection finds the bound.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise

from megatron_dynmo.balancers import partition, partition_virtual
from megatron_dynmo.cost import ModelCosts
from megatron_dynmo.planner.question import Question

__all__ = ["iteration_bound_ms", "stage_bound_ms"]

_BISECTIONS = 60


def stage_bound_ms(question: Question) -> float:
    """Time of one micro-batch that the slowest rank takes at least, whatever the split.

    Exact for one chunk a rank; with virtual stages a bound that may not be reached.

    Raises:
        BalanceError: fewer layers than min_layers needs.
    """
    costs, num_stages = question.costs, question.num_stages
    times = [layer.total_ms for layer in costs.layers]
    first, last = costs.first_stage_extra.total_ms, costs.last_stage_extra.total_ms
    if question.virtual_stages > 1:
        return partition_virtual(
            times, num_stages, question.virtual_stages, first_stage_extra=first,
            last_stage_extra=last, min_layers=question.min_layers,
        ).lower_bound  # fmt: skip
    bounds = partition(
        times, num_stages, first_stage_extra=first, last_stage_extra=last,
        min_layers=question.min_layers,
    )  # fmt: skip
    prefix = [0.0, *accumulate(times)]
    stages = [prefix[end] - prefix[begin] for begin, end in pairwise(bounds)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


def iteration_bound_ms(question: Question) -> float:
    """Iteration time that no split into whole layers beats.

    With virtual stages the bound is the work of the slowest rank and knows nothing of the bubble.

    Raises:
        BalanceError: as `stage_bound_ms`.
    """
    costs, num_stages = question.costs, question.num_stages
    hops = num_stages * question.virtual_stages - 1
    path = question.total_ms + 2 * hops * costs.p2p_ms
    bound = max(costs.num_microbatches * stage_bound_ms(question), path)
    if question.virtual_stages == 1 and num_stages > 1:
        bound = max(bound, _Filling(question).bound(bound))
    return bound + _optimizer_ms(costs, num_stages)


def _optimizer_ms(costs: ModelCosts, num_stages: int) -> float:
    """What the slowest optimizer step takes at least."""
    steps = [layer.optimizer_ms for layer in costs.layers]
    steps += [costs.first_stage_extra.optimizer_ms, costs.last_stage_extra.optimizer_ms]
    return max(sum(steps) / num_stages, *steps)


class _Filling:
    """Fills stages from the last to the first under a limit on the iteration time."""

    def __init__(self, question: Question) -> None:
        self._costs, self._num_stages = question.costs, question.num_stages
        self._min_layers, self._path = question.min_layers, question.total_ms
        costs = question.costs
        # [i] is the time of the layers from i on, so it falls; the extras are added by stage.
        self._forward = [*accumulate((c.forward_ms for c in reversed(costs.layers)), initial=0.0)]
        self._total = [*accumulate((c.total_ms for c in reversed(costs.layers)), initial=0.0)]

    def bound(self, lower: float) -> float:
        """The least time, at least lower, under which every layer finds a place."""
        upper = max(lower, self._path * self._costs.num_microbatches)
        upper += 2 * (self._num_stages - 1) * self._costs.p2p_ms
        if self._places_all(lower):
            return lower
        for _ in range(_BISECTIONS):
            middle = (lower + upper) / 2
            if self._places_all(middle):
                upper = middle
            else:
                lower = middle
        return lower

    def _places_all(self, limit: float) -> bool:
        placed, num_layers = 0, len(self._costs.layers)
        for stage in reversed(range(self._num_stages)):
            begin = placed
            fewest, most = begin + self._min_layers, num_layers - self._min_layers * stage

            def exceeds(end: int, stage: int = stage, begin: int = begin) -> bool:
                return self._time(stage, begin, end) > limit

            if exceeds(fewest):
                return False
            # The last end that does not exceed the limit.
            placed = bisect_left(range(fewest, most + 1), True, key=exceeds) + fewest - 1
        return placed == num_layers

    def _time(self, stage: int, begin: int, end: int) -> float:
        """Bound on the iteration by a stage that owns layers begin to end, from the last one."""
        costs, last_stage = self._costs, self._num_stages - 1
        forward = self._forward[end] - self._forward[begin]
        total = self._total[end] - self._total[begin]
        behind = self._total[begin]
        if stage == last_stage:
            forward += costs.last_stage_extra.forward_ms
            total += costs.last_stage_extra.total_ms
        else:
            behind += costs.last_stage_extra.total_ms
        if stage == 0:
            forward += costs.first_stage_extra.forward_ms
            total += costs.first_stage_extra.total_ms
        before = max(self._path - total - behind, 0.0) + 2 * stage * costs.p2p_ms
        behind += 2 * (last_stage - stage) * costs.p2p_ms
        warmup = min(costs.num_microbatches, self._num_stages - stage)
        wait = max(0.0, behind - (warmup - 1) * forward)
        return before + costs.num_microbatches * total + wait

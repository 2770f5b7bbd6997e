"""Choosing a layout by what it makes of the iteration, not by its slowest stage alone.

The slowest stage sets the pace of a long iteration, and the min-max split is the place to start.
But warm-up and cool-down, forward against backward, latency and the tail after the last backward
count too: two splits with the same slowest stage can differ, and a slightly slower stage can be
worth it. So neighbouring splits are compared by their predicted iteration time, all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.balancers.climb import NOTICEABLE, Budget, Splits, climb
from megatron_dynmo.balancers.partition import partition
from megatron_dynmo.balancers.prediction import SplitPredictions
from megatron_dynmo.balancers.virtual import partition_virtual
from megatron_dynmo.batch_schedule import timing_work
from megatron_dynmo.cost import ModelCosts, stage_costs
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.layout import LayerLayout

__all__ = ["LayoutChoice", "choose_layout", "largest_stage_ms", "min_max_layout"]

_MAX_WORK = 2e9  # about a second
_WORTHWHILE = 1e-3  # of the iteration; for less the current layout stays


@dataclass(frozen=True)
class LayoutChoice:
    """The layout with the best predicted iteration time, and why.

    Attributes:
        layout: the choice.
        min_max: the layout whose slowest stage is fastest.
        reason: one line that compares both.
        iteration_ms: predicted iteration time of the choice; None where the budget did not
            suffice for predicting.
        min_max_iteration_ms: that of `min_max`; less than iteration_ms by a thousandth at most.
    """

    layout: LayerLayout
    min_max: LayerLayout
    reason: str
    iteration_ms: float | None = None
    min_max_iteration_ms: float | None = None


def largest_stage_ms(
    costs: ModelCosts, layout: LayerLayout, stage_speeds: Sequence[float] | None = None
) -> float:
    """Forward and backward time of the slowest rank for one micro-batch, over all its chunks."""
    ranks = [0.0] * layout.num_stages
    for stage in stage_costs(costs, layout):
        speed = 1.0 if stage_speeds is None else stage_speeds[stage.pp_rank]
        ranks[stage.pp_rank] += stage.total_ms / speed
    return max(ranks)


def min_max_layout(
    costs: ModelCosts,
    num_stages: int,
    *,
    virtual_stages: int = 1,
    stage_speeds: Sequence[float] | None = None,
    stage_memory_limit: float | None = None,
    min_layers: int = 1,
    current: LayerLayout | None = None,
) -> LayerLayout:
    """The layout whose slowest rank is fastest, within memory; ties move fewest bytes.

    Args:
        costs: the model's costs.
        num_stages: pipeline-parallel size.
        virtual_stages: chunks on each rank; more than one is searched, not exact.
        stage_speeds: relative speed of each rank; equal when None.
        stage_memory_limit: bytes allowed on each rank; with virtual stages activations in flight
            are not counted, so leave room for them.
        min_layers: fewest layers of a chunk.
        current: the layout in force, of the same shape; also says how many MTP layers there are.

    Raises:
        BalanceError: input that makes no sense, or memory in which nothing fits.
    """
    _check_current(costs, num_stages, virtual_stages, current)
    layers, first, last = costs.layers, costs.first_stage_extra, costs.last_stage_extra
    times = [layer.total_ms for layer in layers]
    memory = [layer.memory_bytes for layer in layers] if stage_memory_limit is not None else None
    active = [layer.activation_bytes for layer in layers]
    bounds = None if current is None else current.boundaries
    if virtual_stages == 1:
        boundaries = partition(
            times, num_stages, first_stage_extra=first.total_ms, last_stage_extra=last.total_ms,
            stage_speeds=stage_speeds, min_layers=min_layers, layer_memory=memory,
            layer_activation_memory=active if memory is not None and any(active) else None,
            num_microbatches=costs.num_microbatches, stage_memory_limit=stage_memory_limit,
            first_stage_memory=first.memory_bytes
            + first.activation_bytes * min(costs.num_microbatches, num_stages),
            last_stage_memory=last.memory_bytes + last.activation_bytes,
            current=bounds, layer_bytes=[layer.memory_bytes or 1 for layer in layers],
        )  # fmt: skip
    else:
        boundaries = partition_virtual(
            times, num_stages, virtual_stages, first_stage_extra=first.total_ms,
            last_stage_extra=last.total_ms, stage_speeds=stage_speeds, min_layers=min_layers,
            layer_memory=memory, stage_memory_limit=stage_memory_limit, current=bounds,
        ).boundaries  # fmt: skip
    if current is not None:
        return current.with_boundaries(boundaries)
    return LayerLayout.from_boundaries(
        boundaries, num_stages=num_stages, virtual_stages=virtual_stages
    )


def choose_layout(
    costs: ModelCosts,
    num_stages: int,
    *,
    virtual_stages: int = 1,
    stage_speeds: Sequence[float] | None = None,
    stage_memory_limit: float | None = None,
    min_layers: int = 1,
    current: LayerLayout | None = None,
    schedule: str | None = None,
    max_work: float = _MAX_WORK,
) -> LayoutChoice:
    """The layout with the least predicted iteration time among good ones.

    Climbs from the min-max layout, and from the current one, by moving runs of boundaries for as
    long as the prediction falls. The current layout stays unless a thousandth is gained, for
    predictions are no better than that; among equals the min-max layout wins. Layouts that hold
    more than stage_memory_limit, activations in flight included, are left out; only the min-max
    layout of virtual stages can hold more, as `min_max_layout` says.

    Args:
        costs: as `min_max_layout`, like the next six.
        num_stages: see there.
        virtual_stages: see there.
        stage_speeds: see there.
        stage_memory_limit: see there.
        min_layers: see there.
        current: see there.
        schedule: one of `pipeline_schedule.SCHEDULES`; by default what Megatron runs.
        max_work: bounds the time for predicting, in units of `batch_schedule.timing_work`, of
            which a core does about two in a nanosecond. When it is used up the best layout so far
            is the answer: the min-max one if there was not even enough to begin.

    Raises:
        BalanceError: as `min_max_layout`.
        ConfigError: the micro-batches do not suit the schedule.
    """
    min_max = min_max_layout(
        costs, num_stages, virtual_stages=virtual_stages, stage_speeds=stage_speeds,
        stage_memory_limit=stage_memory_limit, min_layers=min_layers, current=current,
    )  # fmt: skip
    if schedule is None:
        schedule = "1f1b" if virtual_stages == 1 else "interleaved"
    splits = SplitPredictions(costs, num_stages, virtual_stages, stage_speeds, schedule)
    shape = (num_stages, virtual_stages, costs.num_microbatches)
    budget = Budget(max_work, lambda count: timing_work(schedule, count, *shape))
    allows = None
    if stage_memory_limit is not None:
        allows = partial(_fits, splits, stage_memory_limit)
    starts = [min_max]
    if current is not None and (allows is None or allows(_row(current))[0]):
        starts.insert(0, current)
    if not budget.take(len(starts)):
        return LayoutChoice(
            min_max, min_max, f"{min_max}: fastest slowest stage; iteration times were not "
            f"compared, {num_stages} stages and {costs.num_microbatches} micro-batches being too "
            "many for the time allowed",
        )  # fmt: skip
    times = splits.iteration_ms(np.concatenate([_row(start) for start in starts])).tolist()
    ends = list(zip(starts, times, strict=True))
    # The faster one first: it deserves what there is of the budget.
    for k in np.argsort(times, kind="stable").tolist():
        bounds, end_ms = climb(
            starts[k].chunk_boundaries, splits.iteration_ms, budget, start_time=times[k],
            at_least=splits.at_least_ms, allows=allows, min_layers=min_layers,
        )  # fmt: skip
        ends[k] = starts[k].with_boundaries(bounds), end_ms
    best, best_ms = ends[0]
    if ends[-1][1] < best_ms * (1 - NOTICEABLE):
        best, best_ms = ends[-1]
    if starts[0] == current and best_ms >= times[0] * (1 - _WORTHWHILE):
        best, best_ms = starts[0], times[0]
    reason = _explain(costs, best, min_max, best_ms, times[-1], stage_speeds)
    return LayoutChoice(best, min_max, reason, best_ms, times[-1])


def _row(layout: LayerLayout) -> Splits:
    """A layout as a single split."""
    return np.array([layout.chunk_boundaries], dtype=np.intp)


def _fits(predictions: SplitPredictions, limit: float, splits: Splits) -> NDArray[np.bool_]:
    fits: NDArray[np.bool_] = predictions.peak_bytes(splits) <= limit
    return fits


def _check_current(
    costs: ModelCosts, num_stages: int, virtual_stages: int, current: LayerLayout | None
) -> None:
    if current is None:
        return
    found = (current.num_layers, current.num_stages, current.virtual_stages)
    wanted = (len(costs.layers), num_stages, virtual_stages)
    if found != wanted:
        raise BalanceError(
            f"the current layout {current} has (layers, stages, virtual stages) {found}, the costs "
            f"and the request have {wanted}"
        )
    if current.mtp_chunk not in (None, current.num_chunks - 1):
        raise BalanceError(
            f"the layout {current} has its MTP layers before the last chunk; layers cannot be "
            "balanced around them: put m before L in the last chunk"
        )


def _explain(
    costs: ModelCosts,
    best: LayerLayout,
    min_max: LayerLayout,
    best_ms: float,
    min_max_ms: float,
    stage_speeds: Sequence[float] | None,
) -> str:
    if best == min_max:
        return f"{best}: fastest slowest stage, and predicted best at {best_ms:.3f} ms"
    slowest = largest_stage_ms(costs, best, stage_speeds)
    slowest_min_max = largest_stage_ms(costs, min_max, stage_speeds)
    if best_ms >= min_max_ms * (1 - NOTICEABLE):
        return (
            f"{best}: predicted {best_ms:.3f} ms, as good as {min_max} with the fastest slowest "
            f"stage ({slowest_min_max:.3f} against {slowest:.3f} ms a micro-batch)"
        )
    return (
        f"{best}: predicted {best_ms:.3f} ms against {min_max_ms:.3f} ms for {min_max}, though "
        f"its slowest stage takes {slowest:.3f} ms a micro-batch against {slowest_min_max:.3f} ms: "
        f"with {costs.num_microbatches} micro-batches, warm-up, cool-down and optimizer count too"
    )

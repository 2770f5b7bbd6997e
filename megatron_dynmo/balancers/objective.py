"""Choosing a layout by what it makes of the iteration, not by its slowest stage alone.

The slowest stage sets the pace of a long iteration, and the min-max split is the place to start.
But warm-up and cool-down, forward against backward, latency and the tail after the last backward
count too: two splits with the same slowest stage can differ, and a slightly slower stage can be
worth it. So neighbouring splits are compared by their predicted iteration time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dynmo.balancers.partition import partition
from megatron_dynmo.balancers.virtual import partition_virtual
from megatron_dynmo.cost import ModelCosts, predict_layout_ms, stage_costs
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.layout import LayerLayout

__all__ = ["LayoutChoice", "choose_layout", "largest_stage_ms", "min_max_layout"]

_MAX_PREDICTIONS = 2_000
_NOTICEABLE = 1e-9  # relative: below this, differences are rounding


@dataclass(frozen=True)
class LayoutChoice:
    """The layout with the best predicted iteration time, and why.

    Attributes:
        layout: the choice.
        iteration_ms: its predicted iteration time.
        min_max: the layout whose slowest stage is fastest.
        min_max_iteration_ms: that one's predicted iteration time, never less than iteration_ms.
        reason: one line that compares both.
    """

    layout: LayerLayout
    iteration_ms: float
    min_max: LayerLayout
    min_max_iteration_ms: float
    reason: str


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
) -> LayoutChoice:
    """The layout with the least predicted iteration time among good ones.

    Climbs from the min-max layout, and from the current one, by single boundary moves for as long
    as the prediction falls. Among equals the current layout wins, then the min-max one. Layouts
    that hold more than stage_memory_limit are left out.

    Args:
        costs: as `min_max_layout`, like all others.
        num_stages: see there.
        virtual_stages: see there.
        stage_speeds: see there.
        stage_memory_limit: see there.
        min_layers: see there.
        current: see there.

    Raises:
        BalanceError: as `min_max_layout`.
        ConfigError: the micro-batches do not suit the schedule.
    """
    min_max = min_max_layout(
        costs, num_stages, virtual_stages=virtual_stages, stage_speeds=stage_speeds,
        stage_memory_limit=stage_memory_limit, min_layers=min_layers, current=current,
    )  # fmt: skip
    known: dict[LayerLayout, float] = {}

    def predict(layout: LayerLayout) -> float:
        if layout not in known:
            known[layout] = predict_layout_ms(costs, layout, stage_speeds=stage_speeds)
        return known[layout]

    def fits(layout: LayerLayout) -> bool:
        return stage_memory_limit is None or _peak_bytes(costs, layout) <= stage_memory_limit

    starts = [min_max]
    if current is not None and fits(current):
        starts.insert(0, current)
    best = starts[0]
    for start in starts:
        at, improved = start, True
        while improved and len(known) < _MAX_PREDICTIONS:
            around = (other for other in _neighbours(at, min_layers) if fits(other))
            other = min(around, key=predict, default=at)
            improved = predict(other) < predict(at) * (1 - _NOTICEABLE)
            at = other if improved else at
        if predict(at) < predict(best) * (1 - _NOTICEABLE):
            best = at
    reason = _explain(costs, best, min_max, predict(best), predict(min_max), stage_speeds)
    return LayoutChoice(best, predict(best), min_max, predict(min_max), reason)


def _neighbours(layout: LayerLayout, min_layers: int) -> Iterator[LayerLayout]:
    """Layouts that differ by one layer handed over one boundary."""
    for boundary in range(1, layout.num_chunks):
        for step in (-1, 1):
            bounds = layout.boundaries
            bounds[boundary] += step
            left = bounds[boundary] - bounds[boundary - 1]
            right = bounds[boundary + 1] - bounds[boundary]
            if min(left, right) >= min_layers:
                yield layout.with_boundaries(bounds)


def _peak_bytes(costs: ModelCosts, layout: LayerLayout) -> int:
    """Memory of the fullest rank; 1F1B keeps min(M, P - s) micro-batches on stage s in flight."""
    held = [0] * layout.num_stages
    for stage in stage_costs(costs, layout):
        in_flight = min(costs.num_microbatches, layout.num_stages - stage.pp_rank)
        active = stage.activation_bytes * in_flight if layout.virtual_stages == 1 else 0
        held[stage.pp_rank] += stage.memory_bytes + active
    return max(held)


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
    if best_ms >= min_max_ms * (1 - _NOTICEABLE):
        return (
            f"{best}: predicted {best_ms:.3f} ms, no more than {min_max} with the fastest slowest "
            f"stage ({slowest_min_max:.3f} against {slowest:.3f} ms a micro-batch)"
        )
    return (
        f"{best}: predicted {best_ms:.3f} ms against {min_max_ms:.3f} ms for {min_max}, though "
        f"its slowest stage takes {slowest:.3f} ms a micro-batch against {slowest_min_max:.3f} ms: "
        f"with {costs.num_microbatches} micro-batches, warm-up, cool-down and optimizer count too"
    )

"""What layers and stages cost, and what a pipeline schedule makes of it.

Times are milliseconds of one micro-batch; memory is bytes of one rank. Everything here is a pure
function of numbers, so that every rank that has the numbers comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.pipeline_schedule import ScheduleTimes, time_schedule, times_1f1b

__all__ = [
    "ExtraCost",
    "LayerCost",
    "ModelCosts",
    "ScheduleTimes",
    "StageCost",
    "bubble_fraction",
    "imbalance",
    "makespan",
    "predict_iteration_ms",
    "predict_layout_ms",
    "schedule_times",
    "stage_costs",
]


@dataclass(frozen=True)
class LayerCost:
    """Cost of one transformer layer.

    Attributes:
        layer_number: 1-based.
        forward_ms: forward of one micro-batch.
        backward_ms: backward of one micro-batch, recomputation included.
        memory_bytes: parameters, gradients and optimizer state.
        activation_bytes: kept for the backward, for each micro-batch in flight.
        reduce_ms: gradient all-reduce after the last backward that nothing hides, per iteration.
        optimizer_ms: optimizer step, per iteration.
    """

    layer_number: int
    forward_ms: float
    backward_ms: float
    memory_bytes: int = 0
    activation_bytes: int = 0
    reduce_ms: float = 0.0
    optimizer_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class ExtraCost:
    """What the first stage (embedding) or the last (output, loss, MTP) has besides its layers."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    memory_bytes: int = 0
    activation_bytes: int = 0
    reduce_ms: float = 0.0
    optimizer_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class StageCost:
    """Cost of one model chunk, or of one rank where vp_stage is None: sums over what it owns."""

    pp_rank: int
    vp_stage: int | None
    forward_ms: float
    backward_ms: float
    memory_bytes: int
    activation_bytes: int = 0
    reduce_ms: float = 0.0
    optimizer_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class ModelCosts:
    """A model's costs, as measured or modelled; what costs.json holds.

    Attributes:
        layers: in order, numbered from 1.
        first_stage_extra: embedding.
        last_stage_extra: final norm, output layer, loss and MTP layers.
        num_microbatches: micro-batches of an iteration on one data-parallel rank.
        p2p_ms: one hop between stages, from the end of a pass to the arrival of its output.
    """

    layers: tuple[LayerCost, ...]
    first_stage_extra: ExtraCost = ExtraCost()
    last_stage_extra: ExtraCost = ExtraCost()
    num_microbatches: int = 1
    p2p_ms: float = 0.0


def imbalance(loads: Sequence[float]) -> float:
    """How far the heaviest load is above the mean: max / mean - 1; 0 when there is no load."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1.0 if mean > 0 else 0.0


def bubble_fraction(busy_ms: Sequence[float], idle_ms: Sequence[float]) -> float:
    """Share of the stages' time that is idle: idle / (busy + idle), over all stages."""
    total = sum(busy_ms) + sum(idle_ms)
    return sum(idle_ms) / total if total > 0 else 0.0


def schedule_times(
    schedule: str,
    forward_ms: ArrayLike,
    backward_ms: ArrayLike,
    num_microbatches: int,
    p2p_ms: float = 0.0,
    *,
    num_stages: int | None = None,
    microbatch_group_size: int | None = None,
) -> ScheduleTimes:
    """Makespan, and busy and idle time of every rank, of one iteration's micro-batches.

    Exact for the order in which Megatron runs the passes, for unequal stages too.

    Args:
        schedule: "1f1b", "interleaved" or "gpipe".
        forward_ms: one micro-batch through each chunk: [num_stages] for 1f1b and gpipe;
            [virtual_stages][num_stages] for interleaved, or flat in vp-major order together with
            num_stages.
        backward_ms: the same for the backward pass.
        num_microbatches: micro-batches of the iteration.
        p2p_ms: from the end of a pass to its output's arrival at the next stage; the sender does
            not wait (Megatron overlaps sends).
        num_stages: pipeline size, needed only for flat interleaved times.
        microbatch_group_size: Megatron's microbatch_group_size_per_vp_stage; num_stages if None.

    Raises:
        ConfigError: shapes that do not fit together, or micro-batches that Megatron refuses.
    """
    forward = _chunk_times(schedule, forward_ms, num_stages, "forward_ms")
    backward = _chunk_times(schedule, backward_ms, num_stages, "backward_ms")
    if forward.shape != backward.shape:
        raise ConfigError(
            f"forward_ms has shape {forward.shape}, backward_ms {backward.shape}: they must agree"
        )
    if schedule == "1f1b" and num_microbatches >= 1:
        finish = times_1f1b(forward[0], backward[0], num_microbatches, p2p_ms)
    else:
        _, ends = time_schedule(
            schedule,
            forward,
            backward,
            num_microbatches,
            p2p_ms,
            microbatch_group_size=microbatch_group_size,
        )
        finish = ends.max(axis=(0, 2))
    total = float(finish.max())
    busy = (num_microbatches * (forward + backward).sum(axis=0)).tolist()
    return ScheduleTimes(total, busy, [max(total - b, 0.0) for b in busy], finish.tolist())


def makespan(
    schedule: str,
    forward_ms: ArrayLike,
    backward_ms: ArrayLike,
    num_microbatches: int,
    p2p_ms: float = 0.0,
    *,
    num_stages: int | None = None,
    microbatch_group_size: int | None = None,
) -> float:
    """Time in ms from the first forward to the last backward; arguments as `schedule_times`.

    For P equal stages without latency this is (M + P - 1)(f + b) under 1F1B and GPipe, and
    (M + (P - 1) / V)(f + b) under interleaving with f and b of a whole rank.

    Raises:
        ConfigError: as `schedule_times`.
    """
    return schedule_times(
        schedule,
        forward_ms,
        backward_ms,
        num_microbatches,
        p2p_ms,
        num_stages=num_stages,
        microbatch_group_size=microbatch_group_size,
    ).makespan_ms


def predict_iteration_ms(
    schedule: str,
    forward_ms: ArrayLike,
    backward_ms: ArrayLike,
    num_microbatches: int,
    p2p_ms: float = 0.0,
    *,
    reduce_ms: float | Sequence[float] = 0.0,
    optimizer_ms: float | Sequence[float] = 0.0,
    num_stages: int | None = None,
    microbatch_group_size: int | None = None,
) -> float:
    """Predicted time of a whole iteration: the schedule and the tail behind it.

    A rank reduces its gradients as soon as its own last backward is done, so a late stage's
    reduction hides behind the cool-down of the earlier ones. The gradient norm then needs all
    ranks, and the slowest optimizer step ends the iteration.

    Args:
        schedule: as `schedule_times`, like the next four.
        forward_ms: see there.
        backward_ms: see there.
        num_microbatches: see there.
        p2p_ms: see there.
        reduce_ms: gradient reduction that nothing hides; one number or one for each pp_rank.
        optimizer_ms: optimizer step; one number or one for each pp_rank.
        num_stages: see `schedule_times`.
        microbatch_group_size: see `schedule_times`.

    Raises:
        ConfigError: as `schedule_times`.
    """
    times = schedule_times(
        schedule,
        forward_ms,
        backward_ms,
        num_microbatches,
        p2p_ms,
        num_stages=num_stages,
        microbatch_group_size=microbatch_group_size,
    )
    reduced = np.asarray(times.finish_ms) + np.asarray(reduce_ms, dtype=np.float64)
    return float(reduced.max() + np.asarray(optimizer_ms, dtype=np.float64).max())


def stage_costs(costs: ModelCosts, layout: LayerLayout) -> list[StageCost]:
    """Cost of every model chunk under a layout, in vp-major order, extras included.

    Raises:
        ConfigError: costs and layout speak of different numbers of layers.
    """
    if len(costs.layers) != layout.num_layers:
        raise ConfigError(
            f"costs of {len(costs.layers)} layers, but the layout {layout} has {layout.num_layers}"
        )
    bounds, stages = layout.boundaries, []
    for chunk in range(layout.num_chunks):
        parts: list[LayerCost | ExtraCost] = list(costs.layers[bounds[chunk] : bounds[chunk + 1]])
        if chunk == 0:
            parts.insert(0, costs.first_stage_extra)
        if chunk == layout.num_chunks - 1:
            parts.append(costs.last_stage_extra)
        vp_stage, pp_rank = divmod(chunk, layout.num_stages)
        stages.append(_sum_parts(pp_rank, vp_stage, parts))
    return stages


def predict_layout_ms(
    costs: ModelCosts, layout: LayerLayout, *, stage_speeds: Sequence[float] | None = None
) -> float:
    """Predicted iteration time in ms of a model under a layout, by `predict_iteration_ms`.

    Virtual stages run interleaved, one chunk a rank runs 1F1B, as in Megatron.

    Args:
        costs: the model's costs, measured on a rank of speed 1.
        layout: who owns which layers.
        stage_speeds: relative speed of each rank; equal when None.

    Raises:
        ConfigError: as `stage_costs` and `schedule_times`.
    """
    stages = stage_costs(costs, layout)
    shape = (layout.virtual_stages, layout.num_stages)
    speeds = np.ones(layout.num_stages) if stage_speeds is None else np.asarray(stage_speeds)

    def chunk_times(name: str) -> NDArray[np.float64]:
        return np.array([getattr(s, name) for s in stages], np.float64).reshape(shape) / speeds

    per_rank = {
        name: chunk_times(name).sum(axis=0).tolist() for name in ("reduce_ms", "optimizer_ms")
    }
    interleaved = layout.virtual_stages > 1
    return predict_iteration_ms(
        "interleaved" if interleaved else "1f1b",
        chunk_times("forward_ms"),
        chunk_times("backward_ms"),
        costs.num_microbatches,
        costs.p2p_ms,
        num_stages=layout.num_stages,
        **per_rank,
    )


def _sum_parts(
    pp_rank: int, vp_stage: int | None, parts: Sequence[LayerCost | ExtraCost]
) -> StageCost:
    """Add up what a chunk owns."""
    return StageCost(
        pp_rank=pp_rank,
        vp_stage=vp_stage,
        forward_ms=sum(p.forward_ms for p in parts),
        backward_ms=sum(p.backward_ms for p in parts),
        memory_bytes=sum(p.memory_bytes for p in parts),
        activation_bytes=sum(p.activation_bytes for p in parts),
        reduce_ms=sum(p.reduce_ms for p in parts),
        optimizer_ms=sum(p.optimizer_ms for p in parts),
    )


def _chunk_times(
    schedule: str, times_ms: ArrayLike, num_stages: int | None, name: str
) -> NDArray[np.float64]:
    """Bring stage times to [virtual_stages, num_stages] and refuse what cannot be a time."""
    times = np.asarray(times_ms, dtype=np.float64)
    if times.ndim == 1 and schedule == "interleaved":
        if num_stages is None or num_stages < 1 or len(times) % num_stages:
            raise ConfigError(
                f"{name} has {len(times)} chunks in one row and num_stages is {num_stages}: give "
                "num_stages, a divisor of the chunks, or one row for each vp_stage"
            )
        times = times.reshape(-1, num_stages)
    elif times.ndim == 1:
        times = times[None, :]
    if times.ndim != 2 or times.size == 0:
        raise ConfigError(f"{name} has shape {times.shape}: one time for each stage is needed")
    if not (np.isfinite(times) & (times >= 0)).all():
        raise ConfigError(f"{name} must hold finite times of at least 0 ms, got {times.tolist()}")
    return times

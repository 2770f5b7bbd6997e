"""ProfileReport: what all ranks measured in one iteration, merged exactly and in any order.

Every rank writes its sample into one vector, -1 where it owns nothing; MIN over the ranks that
wait for each other inside a layer (tensor parallel; in MoE layers, those that exchange tokens) and
MAX over the world then merge them without any rounding, so every rank reads the same report. Tier:
torch, not Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts, bubble_fraction, imbalance
from megatron_dynmo.errors import ConservationError
from megatron_dynmo.profile_sample import ExtraSample, LayerSample, StageSample, Timing

__all__ = [
    "ProfileReport",
    "ProfileShape",
    "StageProfile",
    "costs_vector",
    "from_vector",
    "times_of",
]

_NOT_MINE = -1.0
_FIELDS = 4  # of a layer and of an extra: forward, backward, static bytes, activation bytes
_CHUNK_FIELDS = 4  # forward, backward, busy, idle
_RANK_FIELDS = 2  # forward-backward time, peak memory


@dataclass(frozen=True)
class ProfileShape:
    """What all ranks agree on, and so the meaning of each element of the vector.

    Attributes:
        num_layers: decoder layers of the model.
        num_stages: pipeline ranks.
        virtual_stages: chunks on each rank.
    """

    num_layers: int
    num_stages: int
    virtual_stages: int = 1

    @property
    def size(self) -> int:
        """Elements of the vector."""
        num_chunks = self.num_stages * self.virtual_stages
        per_rank = _RANK_FIELDS * self.num_stages
        return 2 + 2 * _FIELDS + _FIELDS * self.num_layers + per_rank + _CHUNK_FIELDS * num_chunks

    def split(self, vector: torch.Tensor) -> _Parts:
        """Return views of the vector's parts, each shaped as its attribute says."""
        sizes = (2, 2 * _FIELDS, _FIELDS * self.num_layers, _RANK_FIELDS * self.num_stages)
        iteration, extras, layers, ranks, chunks = vector.tensor_split(
            torch.tensor(sizes).cumsum(0)
        )
        return _Parts(
            iteration=iteration,
            extras=extras.view(2, _FIELDS),
            layers=layers.view(self.num_layers, _FIELDS),
            ranks=ranks.view(self.num_stages, _RANK_FIELDS),
            chunks=chunks.view(self.num_stages, self.virtual_stages, _CHUNK_FIELDS),
        )


@dataclass(frozen=True)
class _Parts:
    """Views of a vector: float64, each sharing its memory.

    Attributes:
        iteration: [2], iteration time and micro-batches.
        extras: [2, 4], the embedding's side and the output's.
        layers: [num_layers, 4].
        ranks: [num_stages, 2].
        chunks: [num_stages, virtual_stages, 4].
    """

    iteration: torch.Tensor
    extras: torch.Tensor
    layers: torch.Tensor
    ranks: torch.Tensor
    chunks: torch.Tensor


@dataclass(frozen=True)
class StageProfile:
    """One pipeline stage in one iteration.

    Attributes:
        pp_rank: pipeline rank.
        vp_stage: virtual stage.
        forward_ms: a whole forward step of one micro-batch.
        backward_ms: a whole backward step of one micro-batch.
        busy_ms: all its steps of the iteration.
        idle_ms: waiting. Over the stages of a rank, busy and idle add up to the pipeline's
            forward-backward time.
    """

    pp_rank: int
    vp_stage: int
    forward_ms: float
    backward_ms: float
    busy_ms: float
    idle_ms: float


@dataclass(frozen=True)
class ProfileReport:
    """What one iteration cost, the same on every rank.

    Attributes:
        costs: layers and extras, per micro-batch.
        stages: every (pp_rank, vp_stage), ascending.
        imbalance: of the ranks' busy time: max / mean - 1.
        bubble_fraction: idle / (busy + idle) of forward and backward, over all ranks.
        iteration_ms: the whole training step, on the slowest rank.
        forward_backward_ms: from the start of the schedule to the last backward of any rank.
        peak_memory_bytes: most memory in use so far, by pp_rank.
    """

    costs: ModelCosts
    stages: tuple[StageProfile, ...]
    imbalance: float
    bubble_fraction: float
    iteration_ms: float
    forward_backward_ms: float
    peak_memory_bytes: tuple[int, ...]

    @property
    def tail_ms(self) -> float:
        """The iteration without its schedule: gradient reduction and optimizer."""
        return max(0.0, self.iteration_ms - self.forward_backward_ms)

    @property
    def rank_busy_ms(self) -> tuple[float, ...]:
        """Busy time of the iteration by pp_rank."""
        return _by_rank([(stage.pp_rank, stage.busy_ms) for stage in self.stages])

    @property
    def rank_idle_ms(self) -> tuple[float, ...]:
        """Idle time of the iteration by pp_rank."""
        return _by_rank([(stage.pp_rank, stage.idle_ms) for stage in self.stages])


def costs_vector(
    sample: StageSample | None, shape: ProfileShape, pp_rank: int, *, use_median: bool = True
) -> torch.Tensor:
    """Write one rank's sample into the vector that merges by MIN and MAX.

    Args:
        sample: what the rank measured; None for a rank that takes no part (parked).
        shape: the model and pipeline, the same on every rank.
        pp_rank: the rank's place in the pipeline.
        use_median: take the median over micro-batches, which a hiccup does not move; else the
            mean, which adds up to the busy time also where micro-batches differ.

    Returns:
        float64 [shape.size] on the CPU, owned by the caller.
    """
    vector = torch.full((shape.size,), _NOT_MINE, dtype=torch.float64)
    if sample is None:
        return vector

    def ms(timing: Timing) -> float:
        return timing.median_ms if use_median else timing.mean_ms

    def row(part: LayerSample | ExtraSample) -> torch.Tensor:
        times = (ms(part.forward), ms(part.backward))
        return torch.tensor((*times, part.static_bytes, part.activation_bytes), dtype=torch.float64)

    parts = shape.split(vector)
    parts.iteration[0], parts.iteration[1] = sample.iteration_ms, sample.num_microbatches
    # Other stages may hold a copy of the embedding (tied weights, MTP); its place is the first.
    if sample.first_extra is not None and pp_rank == 0:
        parts.extras[0] = row(sample.first_extra)
    if sample.last_extra is not None and pp_rank == shape.num_stages - 1:
        parts.extras[1] = row(sample.last_extra)
    for layer in sample.layers:
        parts.layers[layer.layer_number - 1] = row(layer)
    parts.ranks[pp_rank, 0] = sample.forward_backward_ms
    parts.ranks[pp_rank, 1] = sample.peak_memory_bytes
    for chunk in sample.chunks:
        values = (ms(chunk.forward), ms(chunk.backward), chunk.busy_ms, chunk.idle_ms)
        parts.chunks[pp_rank, chunk.vp_stage] = torch.tensor(values, dtype=torch.float64)
    return vector


def times_of(layer_numbers: Sequence[int], shape: ProfileShape) -> torch.Tensor:
    """Say which elements of the vector are times of these layers.

    Args:
        layer_numbers: 1-based.
        shape: as given to `costs_vector`.

    Returns:
        bool [shape.size] on the CPU, owned by the caller.
    """
    is_time = torch.zeros(shape.size, dtype=torch.bool)
    for number in layer_numbers:
        shape.split(is_time).layers[number - 1, :2] = True
    return is_time


def from_vector(vector: torch.Tensor, shape: ProfileShape) -> ProfileReport:
    """Read the merged vector.

    Args:
        vector: float64 [shape.size] on any device, after the reductions.
        shape: as given to `costs_vector`.

    Raises:
        ConservationError: A layer or stage was measured by no rank.
    """
    assert vector.shape == (shape.size,) and vector.dtype == torch.float64, vector
    parts = shape.split(vector.cpu())
    _check_complete(parts)
    forward_backward_ms = parts.ranks[:, 0].max().item()
    stages = _stages(parts, forward_backward_ms)
    busy = _by_rank([(stage.pp_rank, stage.busy_ms) for stage in stages])
    idle = _by_rank([(stage.pp_rank, stage.idle_ms) for stage in stages])
    rows = parts.layers.tolist()
    return ProfileReport(
        costs=ModelCosts(
            layers=tuple(
                LayerCost(number, forward, backward, int(static), int(activation))
                for number, (forward, backward, static, activation) in enumerate(rows, 1)
            ),
            first_stage_extra=_extra(parts.extras[0]),
            last_stage_extra=_extra(parts.extras[1]),
            num_microbatches=int(parts.iteration[1].item()),
        ),
        stages=stages,
        imbalance=imbalance(busy),
        bubble_fraction=bubble_fraction(busy, idle),
        iteration_ms=parts.iteration[0].item(),
        forward_backward_ms=forward_backward_ms,
        peak_memory_bytes=tuple(int(value) for value in parts.ranks[:, 1].tolist()),
    )


def _check_complete(parts: _Parts) -> None:
    missing = (parts.layers[:, 0] < 0).nonzero().flatten().tolist()
    if missing:
        numbers = [layer_id + 1 for layer_id in missing]
        raise ConservationError(f"layers {numbers} were measured by no rank: nobody owns them")
    absent = (parts.chunks[..., 0] < 0).nonzero().tolist()
    if absent:
        raise ConservationError(f"no rank measured the stages (pp_rank, vp_stage) {absent}")


def _stages(parts: _Parts, forward_backward_ms: float) -> tuple[StageProfile, ...]:
    """Make the stages, each rank's idle time being what its busy time leaves of the schedule.

    Chunks of one rank share it in proportion to the waiting that was measured before their steps.
    """
    stages = []
    for pp_rank, rows in enumerate(parts.chunks.tolist()):
        rank_idle_ms = max(0.0, forward_backward_ms - sum(busy for _, _, busy, _ in rows))
        waited = sum(idle for *_, idle in rows)
        for vp_stage, (forward, backward, busy, idle) in enumerate(rows):
            share = idle / waited if waited > 0 else float(vp_stage == 0)
            stages.append(
                StageProfile(pp_rank, vp_stage, forward, backward, busy, rank_idle_ms * share)
            )
    return tuple(stages)


def _extra(row: torch.Tensor) -> ExtraCost:
    """Return an extra; nothing where no stage has one (a model without that side)."""
    forward, backward, static, activation = row.clamp(min=0.0).tolist()
    return ExtraCost(forward, backward, int(static), int(activation))


def _by_rank(values: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    totals: dict[int, float] = {}
    for pp_rank, value in values:
        totals[pp_rank] = totals.get(pp_rank, 0.0) + value
    return tuple(totals[pp_rank] for pp_rank in sorted(totals))

"""What one rank measured in one iteration, and how it is worked out from recorded marks.

Recording is profiler.py's business; merging ranks is profile_report.py's. Tier: no torch needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from megatron_dynmo.clock import Clock, Mark

__all__ = [
    "ChunkSample",
    "ExtraSample",
    "LayerSample",
    "Op",
    "StageSample",
    "Step",
    "Timing",
]


class Op(Enum):
    """What a mark inside a step stands for."""

    FORWARD_START = auto()
    FORWARD_END = auto()
    BACKWARD_START = auto()
    BACKWARD_END = auto()
    ASIDE_START = auto()  # the profiler's own slow work, such as reading saved tensors
    ASIDE_END = auto()


@dataclass(slots=True)
class Step:
    """One forward or backward step of one chunk, as recorded.

    Attributes:
        vp_stage: the chunk's virtual stage.
        is_backward: whether it is a backward step.
        start: mark taken when its input was there.
        end: mark taken when its output was ready; set when the step ends.
        records: (what, layer_number, mark) in the order of time; the layer number of an aside is 0.
    """

    vp_stage: int
    is_backward: bool
    start: Mark
    end: Mark = None
    records: list[tuple[Op, int, Mark]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step's time, divided up.

    Attributes:
        busy_ms: duration of the step without the profiler's asides.
        layers_ms: {layer_number: ms}; in a backward step recomputation is included.
        embedding_side_ms: before the first layer (forward) or after the last one (backward).
    """

    busy_ms: float
    layers_ms: dict[int, float]
    embedding_side_ms: float

    @property
    def extra_ms(self) -> float:
        """Time spent outside the layers: embedding, data, output layer, loss."""
        return max(0.0, self.busy_ms - sum(self.layers_ms.values()))

    @property
    def output_side_ms(self) -> float:
        """The part of `extra_ms` that is not on the embedding's side."""
        return max(0.0, self.extra_ms - self.embedding_side_ms)


def divide_step(step: Step, clock: Clock) -> StepTimes:
    """Divide a settled step among its layers and what surrounds them.

    A layer's backward lasts from the gradient of its output to the gradient of its input. Where
    the input needs no gradient there is no such end: it lasts until another layer starts or the
    step ends.
    """
    layers_ms: dict[int, float] = {}
    opened: dict[int, Mark] = {}
    in_backward: tuple[int, Mark] | None = None
    aside_ms, aside = 0.0, step.start

    def add(layer_number: int, start: Mark, end: Mark) -> None:
        spent = clock.elapsed_ms(start, end)
        layers_ms[layer_number] = layers_ms.get(layer_number, 0.0) + spent

    for op, layer_number, mark in step.records:
        if op in (Op.FORWARD_START, Op.BACKWARD_START) and in_backward is not None:
            add(*in_backward, mark)
            in_backward = None
        if op is Op.FORWARD_START:
            opened[layer_number] = mark
        elif op is Op.FORWARD_END:
            add(layer_number, opened.pop(layer_number), mark)
        elif op is Op.BACKWARD_START:
            in_backward = (layer_number, mark)
        elif op is Op.BACKWARD_END:
            if in_backward is not None and in_backward[0] == layer_number:
                add(*in_backward, mark)
                in_backward = None
        elif op is Op.ASIDE_START:
            aside = mark
        else:
            aside_ms += clock.elapsed_ms(aside, mark)
    if in_backward is not None:
        add(*in_backward, step.end)
    return StepTimes(
        busy_ms=clock.elapsed_ms(step.start, step.end) - aside_ms,
        layers_ms=layers_ms,
        embedding_side_ms=_embedding_side_ms(step, clock, open_ended=in_backward is not None),
    )


def _embedding_side_ms(step: Step, clock: Clock, open_ended: bool) -> float:
    """Return the time between the step's edge on the embedding's side and the nearest layer."""
    of_layers = [mark for _, layer_number, mark in step.records if layer_number]
    if not of_layers or open_ended:
        return 0.0
    if step.is_backward:
        return clock.elapsed_ms(of_layers[-1], step.end)
    return clock.elapsed_ms(step.start, of_layers[0])


@dataclass(frozen=True, slots=True)
class Timing:
    """A duration per micro-batch over one iteration.

    Attributes:
        mean_ms: total divided by the number of micro-batches; adds up to the stage's busy time.
        median_ms: the middle one; not moved by a hiccup in a single micro-batch.
    """

    mean_ms: float
    median_ms: float

    @classmethod
    def of(cls, durations_ms: Sequence[float]) -> Timing:
        """Summarise the durations of one iteration's micro-batches; none gives zero."""
        if not durations_ms:
            return cls(0.0, 0.0)
        return cls(sum(durations_ms) / len(durations_ms), statistics.median(durations_ms))


@dataclass(frozen=True, slots=True)
class LayerSample:
    """One layer's cost on this rank.

    Attributes:
        layer_number: 1-based global number.
        forward: forward time.
        backward: backward time, recomputation included.
        static_bytes: parameters, gradients and optimizer state.
        activation_bytes: kept from forward to backward, per micro-batch.
    """

    layer_number: int
    forward: Timing
    backward: Timing
    static_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExtraSample:
    """What a stage computes beside its layers: embedding and data, or output layer and loss."""

    forward: Timing
    backward: Timing
    static_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """One model chunk's share of the iteration.

    Attributes:
        vp_stage: its virtual stage.
        forward: whole forward steps.
        backward: whole backward steps.
        busy_ms: all its steps together.
        idle_ms: time in which the rank waited for one of its steps to become possible.
        num_microbatches: forward steps seen.
    """

    vp_stage: int
    forward: Timing
    backward: Timing
    busy_ms: float
    idle_ms: float
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class StageSample:
    """Everything one rank measured in one iteration.

    Attributes:
        layers: its layers, ascending by layer_number.
        chunks: its chunks, ascending by vp_stage.
        first_extra: the embedding's side, on the rank that owns it.
        last_extra: the output's side, on the rank that owns it.
        iteration_ms: from begin_iteration to end_iteration.
        forward_backward_ms: from the start of the schedule to the end of this rank's last step.
        peak_memory_bytes: most memory in use so far (CUDA allocator, or resident host memory).
    """

    layers: tuple[LayerSample, ...]
    chunks: tuple[ChunkSample, ...]
    first_extra: ExtraSample | None
    last_extra: ExtraSample | None
    iteration_ms: float
    forward_backward_ms: float
    peak_memory_bytes: int = 0

    @property
    def busy_ms(self) -> float:
        """Time the rank computed in its forward and backward steps."""
        return sum(chunk.busy_ms for chunk in self.chunks)

    @property
    def idle_ms(self) -> float:
        """Time the rank waited between its steps."""
        return sum(chunk.idle_ms for chunk in self.chunks)

    @property
    def tail_ms(self) -> float:
        """The rest of the iteration: gradient reduction, optimizer, waiting for other stages."""
        return max(0.0, self.iteration_ms - self.forward_backward_ms)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the iteration."""
        return max((chunk.num_microbatches for chunk in self.chunks), default=0)


def idle_by_chunk(steps: Iterable[Step], start: Mark, clock: Clock) -> dict[int, float]:
    """Return {vp_stage: ms waited}: each gap belongs to the step that it ends with."""
    idle: dict[int, float] = {}
    for step in steps:
        gap = max(0.0, clock.elapsed_ms(start, step.start))
        idle[step.vp_stage] = idle.get(step.vp_stage, 0.0) + gap
        start = step.end
    return idle

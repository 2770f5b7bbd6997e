"""LayerProfiler: time and memory of every layer and stage, from hooks on live modules.

It observes only: no tensor is changed, copied or kept, and the device is waited for once an
iteration, after its last step. Tier: torch, not Megatron (adapters hand in plain modules, patches
call `forward_step` and `backward_step`).
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megatron_dynmo.activation_memory import ActivationMeter, make_meter
from megatron_dynmo.clock import Clock, Mark
from megatron_dynmo.profile_sample import (
    ChunkSample,
    ExtraSample,
    LayerSample,
    Op,
    StageSample,
    Step,
    StepTimes,
    Timing,
    divide_step,
    idle_by_chunk,
)

__all__ = ["ChunkModules", "LayerProfiler", "StaticBytes"]

_VP_STAGE = "_dynmo_vp_stage"


@dataclass(frozen=True)
class ChunkModules:
    """The modules of one model chunk that the profiler looks at.

    Attributes:
        vp_stage: its virtual stage, 0 without virtual stages.
        layers: (layer_number, layer), ascending; a layer takes the hidden states as its first
            argument or as `hidden_states` and returns them alone or first in a tuple.
        embedding: the embedding, on the chunk that computes it.
        output: the output layer, on the chunk that computes it.
    """

    vp_stage: int
    layers: tuple[tuple[int, torch.nn.Module], ...]
    embedding: torch.nn.Module | None = None
    output: torch.nn.Module | None = None

    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Return every module of the chunk."""
        edges = tuple(module for module in (self.embedding, self.output) if module is not None)
        return tuple(layer for _, layer in self.layers) + edges


@dataclass(frozen=True)
class StaticBytes:
    """Memory that does not depend on the micro-batch: parameters, gradients, optimizer state.

    Attributes:
        layers: {layer_number: bytes}.
        embedding: bytes of the embedding's side, if it is here.
        output: bytes of the output's side, if it is here.
    """

    layers: Mapping[int, int]
    embedding: int = 0
    output: int = 0


class LayerProfiler:
    """Measures this rank's layers and stage, one iteration at a time.

    Order of calls: `attach` once and after every move; then in each iteration `begin_iteration`,
    `begin_forward_backward`, any number of `forward_step` and `backward_step`, `end_iteration`.
    Outside an iteration (evaluation) everything passes by unrecorded.

    Args:
        clock: the source of time.
        device: where the model computes.
        memory_interval: iterations from one measurement of activation memory to the next, beside
            the first after each attach; times are measured in every iteration.
    """

    def __init__(
        self, clock: Clock, *, device: torch.device | str = "cpu", memory_interval: int = 100
    ) -> None:
        self._clock = clock
        self._device = torch.device(device)
        self._memory_interval = memory_interval
        self._chunks: dict[int, ChunkModules] = {}
        self._static_bytes: Callable[[], StaticBytes] | None = None
        self._handles: list[RemovableHandle] = []
        self._start: Mark | None = None
        self._forward_backward_start: Mark | None = None
        self._steps: list[Step] = []
        self._step: Step | None = None
        self._memory = _MemoryState()

    # ---------------------------------------------------------------- which modules

    def attach(
        self,
        chunks: Sequence[ChunkModules],
        static_bytes: Callable[[], StaticBytes] | None = None,
    ) -> None:
        """Observe exactly these chunks from now on; hooks of an earlier attach are removed.

        Args:
            chunks: every chunk of this rank; one without layers too.
            static_bytes: called at the end of each iteration that measures memory.
        """
        assert self._start is None, "attach between iterations"
        self.detach()
        self._chunks = {chunk.vp_stage: chunk for chunk in chunks}
        self._static_bytes = static_bytes
        for chunk in chunks:
            for layer_number, layer in chunk.layers:
                before = partial(self._before_layer, layer_number)
                after = partial(self._after_layer, layer_number)
                self._handles += (
                    layer.register_forward_pre_hook(before, with_kwargs=True),
                    layer.register_forward_hook(after, with_kwargs=True),
                )

    def detach(self) -> None:
        """Remove every hook and forget the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._chunks = {}
        self._static_bytes = None
        self._memory = _MemoryState()

    # ---------------------------------------------------------------- one iteration

    def begin_iteration(self) -> None:
        """Start to record; what an aborted iteration left behind is dropped."""
        self._clock.recycle()
        self._steps = []
        self._step = None
        if self._memory.iterations % self._memory_interval == 0:
            self._memory.restart()
        self._memory.iterations += 1
        self._start = self._forward_backward_start = self._clock.mark()

    def begin_forward_backward(self) -> None:
        """Say that the schedule starts now; without this call it starts with the iteration."""
        if self._start is not None and not self._steps:
            self._forward_backward_start = self._clock.mark()

    def end_iteration(self) -> StageSample:
        """Stop recording, wait for the device and return what this rank measured."""
        assert self._start is not None, "end_iteration without begin_iteration"
        start, end = self._start, self._clock.mark()
        self._start = None
        self._clock.settle()
        if self._memory.is_measuring and self._static_bytes is not None:
            self._memory.static = self._static_bytes()
        self._memory.is_measuring = False
        sample = self._summarise(start, end)
        self._clock.recycle()
        self._steps = []
        return sample

    @contextlib.contextmanager
    def forward_step(self, vp_stage: int | None = None) -> Iterator[Callable[[Any], None]]:
        """Time the forward step of one micro-batch: `with ... as produced: produced(output)`.

        Args:
            vp_stage: the chunk; None, as Megatron passes without virtual stages, is 0.

        Yields:
            A function to be given the step's output tensor (or the list that holds it), by which
            the backward step of the same micro-batch finds its chunk.
        """
        step = self._begin_step(vp_stage or 0, is_backward=False)
        outputs: list[torch.Tensor] = []

        def produced(output: Any) -> None:
            tensor = output[0] if isinstance(output, list) else output
            if isinstance(tensor, torch.Tensor):
                setattr(tensor, _VP_STAGE, vp_stage or 0)
                outputs.append(tensor)

        try:
            yield produced
        finally:
            if step is not None:
                self._end_step(step, outputs[0] if outputs else None)

    @contextlib.contextmanager
    def backward_step(self, output: Any) -> Iterator[None]:
        """Time the backward step of one micro-batch.

        Args:
            output: the output tensor of the forward step (or the list that holds it).
        """
        tensor = output[0] if isinstance(output, list) else output
        step = self._begin_step(getattr(tensor, _VP_STAGE, 0), is_backward=True)
        try:
            yield
        finally:
            if step is not None:
                self._end_step(step, None)

    def _begin_step(self, vp_stage: int, is_backward: bool) -> Step | None:
        if self._start is None:
            return None
        assert self._step is None, "a step inside a step"
        assert vp_stage in self._chunks, f"vp_stage {vp_stage} is not attached"
        if not is_backward and self._memory.wants(vp_stage):
            self._memory.meter = make_meter(self._device, self._chunks[vp_stage].modules())
        self._step = Step(vp_stage, is_backward, start=self._clock.mark())
        return self._step

    def _end_step(self, step: Step, output: torch.Tensor | None) -> None:
        if self._memory.meter is not None:
            step.records.append((Op.ASIDE_START, 0, self._clock.mark()))
            self._memory.extra[step.vp_stage] = self._memory.meter.rest(output)
            self._memory.meter = None
            step.records.append((Op.ASIDE_END, 0, self._clock.mark()))
        step.end = self._clock.mark()
        self._steps.append(step)
        self._step = None

    # ---------------------------------------------------------------- hooks

    def _before_layer(
        self, layer_number: int, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> None:
        step = self._step
        if step is None:
            return
        hidden_in = _hidden_states(args, kwargs)
        if hidden_in.requires_grad and torch.is_grad_enabled():
            hidden_in.register_hook(partial(self._on_gradient, Op.BACKWARD_END, layer_number))
        if self._memory.meter is not None:
            self._memory.meter.before_layer()
        step.records.append((Op.FORWARD_START, layer_number, self._clock.mark()))

    def _after_layer(
        self, layer_number: int, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        step = self._step
        if step is None:
            return
        step.records.append((Op.FORWARD_END, layer_number, self._clock.mark()))
        if not torch.is_grad_enabled():
            return
        hidden_in = _hidden_states(args, kwargs)
        hidden_out = output[0] if isinstance(output, tuple) else output
        # A layer that passes its input through has no backward of its own.
        if hidden_out.requires_grad and hidden_out is not hidden_in:
            hidden_out.register_hook(partial(self._on_gradient, Op.BACKWARD_START, layer_number))
        if self._memory.is_measuring:
            self._measure_memory(step, layer_number, hidden_in, hidden_out)

    def _on_gradient(self, op: Op, layer_number: int, grad: torch.Tensor) -> None:
        step = self._step
        if step is not None:
            step.records.append((op, layer_number, self._clock.mark()))

    def _measure_memory(
        self, step: Step, layer_number: int, hidden_in: torch.Tensor, hidden_out: torch.Tensor
    ) -> None:
        """Note what the layer keeps for its backward, in the first micro-batch only."""
        if step.is_backward:
            # Recomputation: what was kept is the checkpoint's input, which comes back as a leaf.
            kept = hidden_in.numel() * hidden_in.element_size() if hidden_in.is_leaf else 0
            self._memory.activations.setdefault(layer_number, kept)
        elif self._memory.meter is not None:
            step.records.append((Op.ASIDE_START, 0, self._clock.mark()))
            kept = self._memory.meter.after_layer(hidden_in, hidden_out)
            self._memory.activations.setdefault(layer_number, kept)
            step.records.append((Op.ASIDE_END, 0, self._clock.mark()))

    # ---------------------------------------------------------------- summary

    def _summarise(self, start: Mark, end: Mark) -> StageSample:
        clock, steps = self._clock, self._steps
        times = [(step, divide_step(step, clock)) for step in steps]
        idle = idle_by_chunk(steps, self._forward_backward_start, clock)
        layers: list[LayerSample] = []
        chunks: list[ChunkSample] = []
        first = last = None
        for vp_stage, chunk in sorted(self._chunks.items()):
            own = [pair for pair in times if pair[0].vp_stage == vp_stage]
            forward = [time for step, time in own if not step.is_backward]
            backward = [time for step, time in own if step.is_backward]
            layers += [self._layer_sample(n, forward, backward) for n, _ in chunk.layers]
            chunks.append(_chunk_sample(vp_stage, forward, backward, idle.get(vp_stage, 0.0)))
            if chunk.embedding is not None:
                first = self._extra_sample(chunk, forward, backward, is_first=True)
            if chunk.output is not None:
                last = self._extra_sample(chunk, forward, backward, is_first=False)
        last_step_end = steps[-1].end if steps else self._forward_backward_start
        return StageSample(
            layers=tuple(sorted(layers, key=lambda layer: layer.layer_number)),
            chunks=tuple(chunks),
            first_extra=first,
            last_extra=last,
            iteration_ms=clock.elapsed_ms(start, end),
            forward_backward_ms=clock.elapsed_ms(self._forward_backward_start, last_step_end),
            peak_memory_bytes=_peak_memory_bytes(self._device),
        )

    def _layer_sample(
        self, layer_number: int, forward: Sequence[StepTimes], backward: Sequence[StepTimes]
    ) -> LayerSample:
        return LayerSample(
            layer_number=layer_number,
            forward=Timing.of([step.layers_ms.get(layer_number, 0.0) for step in forward]),
            backward=Timing.of([step.layers_ms.get(layer_number, 0.0) for step in backward]),
            static_bytes=self._memory.static.layers.get(layer_number, 0),
            activation_bytes=self._memory.activations.get(layer_number, 0),
        )

    def _extra_sample(
        self,
        chunk: ChunkModules,
        forward: Sequence[StepTimes],
        backward: Sequence[StepTimes],
        is_first: bool,
    ) -> ExtraSample:
        """Give the whole extra to the one side a chunk has; divide it where it has both."""
        if chunk.embedding is None or chunk.output is None:
            part = [[step.extra_ms for step in steps] for steps in (forward, backward)]
        elif is_first:
            part = [[step.embedding_side_ms for step in steps] for steps in (forward, backward)]
        else:
            part = [[step.output_side_ms for step in steps] for steps in (forward, backward)]
        static, extra = self._memory.static, self._memory.extra.get(chunk.vp_stage, 0)
        return ExtraSample(
            forward=Timing.of(part[0]),
            backward=Timing.of(part[1]),
            static_bytes=static.embedding if is_first else static.output,
            # The logits are the bulk of it where both sides share a chunk.
            activation_bytes=0 if is_first and chunk.output is not None else extra,
        )


class _MemoryState:
    """What is known of memory since the last attach, and whether this iteration measures it."""

    def __init__(self) -> None:
        self.iterations = 0
        self.is_measuring = False
        self.meter: ActivationMeter | None = None
        self.activations: dict[int, int] = {}
        self.extra: dict[int, int] = {}
        self.static = StaticBytes({})

    def restart(self) -> None:
        """Measure afresh in the iteration that begins."""
        self.is_measuring = True
        self.meter = None
        self.activations = {}
        self.extra = {}

    def wants(self, vp_stage: int) -> bool:
        """Whether the forward step that begins is the one to measure."""
        return self.is_measuring and vp_stage not in self.extra


def _chunk_sample(
    vp_stage: int, forward: Sequence[StepTimes], backward: Sequence[StepTimes], idle_ms: float
) -> ChunkSample:
    return ChunkSample(
        vp_stage=vp_stage,
        forward=Timing.of([step.busy_ms for step in forward]),
        backward=Timing.of([step.busy_ms for step in backward]),
        busy_ms=sum(step.busy_ms for step in (*forward, *backward)),
        idle_ms=idle_ms,
        num_microbatches=len(forward),
    )


def _hidden_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the hidden states a layer was called with."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

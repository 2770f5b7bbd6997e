"""Dropout that does not depend on which rank owns a layer.

Megatron seeds each pipeline stage differently and lets all layers of a stage draw from the same
streams, so a layer that moves draws other numbers. `LayerRng` gives every forward pass of a layer
streams of its own, seeded by run, iteration, micro-batch, layer and the ranks that must differ
(data, context, tensor, expert; never pipeline). Nothing is patched: hooks on instances do it.

At the start of a model chunk's forward pass the *base* streams of the micro-batch are put into the
generator and into Megatron's tracker. Before a layer runs, its streams are derived from the seeds
of those it finds, and after it they are put back. So activation recompute needs nothing: Megatron
restores the base streams of the forward pass, and the layer derives the same ones again. After the
chunk the streams are what they were before it, so whatever else draws from them, and what a
checkpoint saves, is as without this.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)

from megatron_dynmo.adapters.model import ModelChunk, chunks_of
from megatron_dynmo.errors import ConfigError

# Places beside the layers that may draw, in the way of layer numbers.
_EMBEDDING = 0
_MULTI_TOKEN_PREDICTION = -1

_MODEL_PARALLEL = "model-parallel-rng"
_EXPERT_PARALLEL = "expert-parallel-rng"
_DATA_PARALLEL = "data-parallel-rng"


def mix(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on each number and on their order.

    Args:
        numbers: Taken modulo 2**64.
    """
    packed = struct.pack(f"<{len(numbers)}Q", *(number % 2**64 for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class _State:
    """What the streams hold at one moment: uint8 tensors in host memory that nobody changes."""

    generator: torch.Tensor
    tracked: dict[str, torch.Tensor]


# Starts the streams of a module, given what they held before it.
_Start = Callable[[_State], None]


class _Streams:
    """The streams a forward pass draws from: a generator and the states of Megatron's tracker."""

    def __init__(self, generator: torch.Generator, tracker: Any) -> None:
        self._generator = generator
        self._tracker = tracker
        self._scratch = torch.Generator(generator.device)

    def save(self) -> _State:
        """Return what the streams hold."""
        return _State(self._generator.get_state(), self._tracker.get_states())

    def restore(self, state: _State) -> None:
        """Make the streams hold that again."""
        self._generator.set_state(state.generator)
        self._tracker.set_states(dict(state.tracked))

    def start(self, default_seed: int, tracked_seeds: dict[str, int]) -> None:
        """Start the generator, and those of the tracker's streams that exist, at these seeds."""
        self._generator.manual_seed(default_seed)
        states = self._tracker.get_states()
        for name in tracked_seeds.keys() & states.keys():
            states[name] = self._scratch.manual_seed(tracked_seeds[name]).get_state()
        self._tracker.set_states(states)

    def derive(self, place: int, found: _State) -> None:
        """Start every stream anew, by the seed it was started with and a place.

        Args:
            place: A layer number, or that of another place in the model.
            found: What the streams hold now. Inside a fork of the tracker the generator holds
                another stream than outside, which is why its present seed counts.
        """
        seeds = {}
        for name, state in found.tracked.items():
            seeds[name] = mix(self._scratch.set_state(state).initial_seed(), place)
        self.start(mix(self._generator.initial_seed(), place), seeds)


class LayerRng:
    """Streams by (seed, iteration, micro-batch, layer_number) for the layers of a model.

    Attributes:
        iteration: The iteration that forward passes now belong to.
    """

    def __init__(self, seed: int, num_microbatches: Callable[[], int] = get_num_microbatches):
        """Prepare; hooks nothing.

        Args:
            seed: Megatron's `--seed`, equal on all ranks.
            num_microbatches: Micro-batches of the iteration; a pass that is run a second time, as
                Megatron's rerun state machine does, then draws the same numbers.
        """
        self.iteration = 0
        self._seed = seed
        self._num_microbatches = num_microbatches
        self._streams: _Streams | None = None
        # Weak, so that a layer that has left is not kept in memory.
        self._hooks: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = (
            weakref.WeakKeyDictionary()
        )
        # (chunk, is training) -> forward passes in this iteration.
        self._passes: dict[tuple[int, bool], int] = {}

    def attach(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        """Hook the chunks and their layers; call again after layers moved.

        Only what is new is hooked and what has left is let go. The wrappers of a chunk are not
        hooked, so they may be rebuilt.

        Args:
            model_chunks: Megatron's `model` list, or the same chunks without wrappers.

        Raises:
            ConfigError: A feature draws numbers where no hook reaches.
        """
        chunks = chunks_of(model_chunks)
        for chunk in chunks:
            _check(chunk)
        if self._streams is None:
            self._streams = _Streams(_device_generator(), get_cuda_rng_tracker())
        wanted: dict[torch.nn.Module, _Start] = {}
        for chunk in chunks:
            wanted[chunk.core] = functools.partial(self._start_microbatch, chunk)
            for module, place in _places(chunk):
                wanted[module] = functools.partial(self._streams.derive, place)
        for module in set(self._hooks) - wanted.keys():
            self._unhook(module)
        for module in wanted.keys() - set(self._hooks):
            self._hooks[module] = _surround(module, self._streams, wanted[module])

    def detach(self) -> None:
        """Remove every hook; dropout is Megatron's again."""
        for module in list(self._hooks):
            self._unhook(module)

    def begin_iteration(self, iteration: int) -> None:
        """Start an iteration; call before its first forward pass, with one number on all ranks.

        Args:
            iteration: Number of iterations done since the training began, not since a resume.
        """
        self.iteration = iteration
        self._passes.clear()

    def _unhook(self, module: torch.nn.Module) -> None:
        for handle in self._hooks.pop(module):
            handle.remove()

    def _start_microbatch(self, chunk: ModelChunk, found: _State) -> None:
        """Put the base streams of a chunk's next micro-batch in place.

        Every schedule runs the forward passes of a chunk in the order of micro-batches.
        """
        vp_stage, is_training = chunk.vp_stage, chunk.core.training
        microbatch = self._passes.get((vp_stage, is_training), 0)
        self._passes[vp_stage, is_training] = microbatch + 1
        if is_training:
            microbatch %= self._num_microbatches()
        base = (self._seed, self.iteration, microbatch, int(is_training))
        data = mpu.get_data_parallel_rank(with_context_parallel=True)
        tensor = mpu.get_tensor_model_parallel_rank()
        expert = mpu.get_expert_model_parallel_rank(), mpu.get_expert_tensor_parallel_rank()
        assert self._streams is not None
        # Which ranks share a stream is upstream's choice, but that replicas of the model, which see
        # other data, drop other activations.
        self._streams.start(
            mix(*base, 0, data),
            {
                _MODEL_PARALLEL: mix(*base, 1, data, tensor),
                _EXPERT_PARALLEL: mix(*base, 2, data, tensor, *expert),
                _DATA_PARALLEL: mix(*base, 3),
            },
        )


def _surround(module: torch.nn.Module, streams: _Streams, start: _Start) -> list[Any]:
    """Hook a module so that it runs on streams of its own; return the handles."""
    before: list[_State] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        before[:] = [streams.save()]
        start(before[0])

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        streams.restore(before.pop())

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _places(chunk: ModelChunk) -> list[tuple[torch.nn.Module, int]]:
    """Return the modules of a chunk that draw, each with its number in the whole model."""
    places = [(layer, layer.layer_number) for layer in chunk.layers]
    for name, place in (("embedding", _EMBEDDING), ("mtp", _MULTI_TOKEN_PREDICTION)):
        module = getattr(chunk.core, name, None)
        if module is not None:
            places.append((module, place))
    return places


def _check(chunk: ModelChunk) -> None:
    """Refuse what draws numbers where no hook on a layer reaches."""
    config = chunk.block.config
    reason = None
    if getattr(config, "cuda_graph_impl", "none") != "none":
        reason = "--cuda-graph-impl replays layers without their hooks; use --cuda-graph-impl none"
    elif getattr(config, "overlap_moe_expert_parallel_comm", False):
        reason = (
            "--overlap-moe-expert-parallel-comm runs the parts of a layer without the layer; "
            "leave it out"
        )
    elif is_graph_safe_cuda_rng_tracker(get_cuda_rng_tracker()):
        reason = "--te-rng-tracker keeps generators instead of states; leave it out"
    if reason is not None:
        raise ConfigError(f"--dynmo-layer-rng cannot seed each layer: {reason}")


def _device_generator() -> torch.Generator:
    """Return the generator that dropout draws from on the device of this rank."""
    device = torch.cuda.current_device()
    # The CPU layer answers with a torch.device.
    if isinstance(device, torch.device):
        return torch.default_generator
    return torch.cuda.default_generators[device]

"""The front of the model that no gradient has to reach: no backward compute, no backward traffic.

Once the embedding and the first layers are frozen, their outputs need no gradient, nor does the
input of the first trained layer. Autograd finds that out by itself inside a stage. Across stages it
does not: a received tensor requires a gradient, the stage before waits for one, and the pass over
checkpointed layers asks for an input that requires one. All ranks know how deep the dead front
reaches, so both sides of a boundary agree without a message.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_dynmo.adapters.model import ModelChunk


class FrozenFront:
    """How deep the dead front reaches, and what follows from it on this rank.

    Attributes:
        depth: how many layers at the front lie before everything that is trained; None while
            something before layer 1 is trained.
        num_cut: gradients of hidden states that this rank did not receive because of it.
    """

    def __init__(self) -> None:
        self.depth: int | None = None
        self.num_cut = 0
        self._chunks: Sequence[ModelChunk] = ()
        self._num_received = 0
        self._checkpoints: deque[tuple[int, int]] | None = None

    def is_dead(self, layer_number: int) -> bool:
        """Whether no gradient reaches a layer's output."""
        return self.depth is not None and layer_number <= self.depth

    def has_dead_input(self, layer_number: int) -> bool:
        """Whether a layer's input needs no gradient."""
        return self.is_dead(layer_number - 1) if layer_number > 1 else self.depth is not None

    # ---------------------------------------------------------------- across stages

    def attach(self, chunks: Sequence[ModelChunk]) -> None:
        """Follow these chunks of this rank; their blocks are kept over moves."""
        self._chunks = chunks
        for chunk in chunks:
            chunk.block.register_forward_pre_hook(self._forget_gradient)

    def begin_iteration(self) -> None:
        """Start to count an iteration's gradients."""
        self._num_received = 0

    def _forget_gradient(self, block: Any, args: Any) -> None:
        """Take a received tensor out of the graph where its gradient is not sent back.

        The schedule keeps the tensor itself, finds no gradient on it, and sends none.
        """
        if not block.pre_process and self.is_dead(_layers_before(block)):
            block.input_tensor = block.input_tensor.detach()

    def cuts_next(self) -> bool:
        """Whether the gradient that the schedule is about to receive will never be sent.

        To be asked once for every gradient, in the order in which the schedule receives them.
        """
        chunk = self._chunks[self._receiving_chunk() if len(self._chunks) > 1 else 0]
        self._num_received += 1
        is_cut = self.is_dead(_layers_before(chunk.block) + len(chunk.layers))
        self.num_cut += is_cut
        return is_cut

    def _receiving_chunk(self) -> int:
        """Which of this rank's chunks the next gradient is for, in an interleaved schedule.

        The next rank sends one for each of its backward passes, in their order; rank 0 sends those
        of its chunks to the chunks before on the last rank, and none for its first.
        """
        config: Any = self._chunks[0].block.config
        num_chunks = len(self._chunks)
        table = get_schedule_table(
            get_num_microbatches(), num_chunks, config.microbatch_group_size_per_vp_stage
        )
        sent = [num_chunks - 1 - forward_chunk for _, forward_chunk in table]
        if (
            mpu.get_pipeline_model_parallel_rank()
            == mpu.get_pipeline_model_parallel_world_size() - 1
        ):
            sent = [chunk - 1 for chunk in sent if chunk > 0]
        return int(sent[self._num_received % len(sent)])

    # ---------------------------------------------------------------- checkpointed layers

    @contextlib.contextmanager
    def checkpointing(self, block: Any) -> Iterator[None]:
        """For a block's forward under full recompute, know which layers each checkpoint holds."""
        numbers = [layer.layer_number for layer in block.layers]
        size = block.config.recompute_num_layers
        if block.config.recompute_method == "uniform":
            held = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        else:
            held = [[number] for number in numbers[:size]]
        self._checkpoints = deque((layers[0], layers[-1]) for layers in held)
        try:
            yield
        finally:
            self._checkpoints = None

    @contextlib.contextmanager
    def checkpoint(self, hidden: Any) -> Iterator[Any]:
        """Around one checkpoint; yields the input to give it.

        Megatron's checkpoint is part of the graph only where an input requires a gradient: without
        one the layers in it would silently not be trained.
        """
        waiting = self._checkpoints
        if not waiting or self.depth is None:
            yield hidden
            return
        first, last = waiting.popleft()
        self._checkpoints = None  # a checkpoint inside this one is no block's
        try:
            if self.has_dead_input(first):
                yield hidden.detach().requires_grad_(not self.is_dead(last))
            else:
                yield hidden
        finally:
            self._checkpoints = waiting


def _layers_before(block: Any) -> int:
    """How many decoder layers come before a block."""
    return int(
        get_transformer_layer_offset(
            block.config, block.vp_stage, mpu.get_pipeline_model_parallel_rank()
        )
    )

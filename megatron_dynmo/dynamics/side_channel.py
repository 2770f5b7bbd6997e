"""A few bytes for every token that cross stage boundaries with the hidden states, exactly.

A dynamic that skips tokens must know in later layers what earlier ones decided, on whichever stage
those are. Pipeline messages are one tensor of a fixed shape, so the bytes ride on it as columns
beside the hidden dimension: 0 to 255 are exact in bf16, fp16 and fp32. The widened tensor is the
stage's output in the autograd graph, so its gradient comes back as wide and the columns' part of it
is zero: schedules, virtual stages, evaluation and deallocation of outputs need nothing more. Only
the shape that a receiver expects is patched (`megatron_dynmo.patches.side_channel`).

Within a stage the bytes pass from layer to layer as Megatron's `context`, an argument and result of
every layer which a GPT leaves empty, and which full recompute saves with the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# bytes per token of the run's channel; every rank has the same
_num_columns = 0


def widened(shape: Sequence[int] | None) -> Sequence[int] | None:
    """Return the shape of a pipeline message of hidden states, given Megatron's.

    Args:
        shape: [sequence, batch, hidden]; empty where ranks tell each other shapes; None where
            nothing is received.
    """
    if not shape or not _num_columns:
        return shape
    return (*shape[:-1], shape[-1] + _num_columns)


class SideChannel:
    """The columns of the micro-batch that runs on this rank.

    Args:
        num_columns: bytes per token.
        first: makes the columns, uint8 [s, b, num_columns], on the first stage from the tokens,
            int64 [b, s]. s is the part of the sequence that the rank's hidden states have.

    Attributes:
        latest: what the last layer that ran returned; the dynamic sets it.
    """

    def __init__(self, num_columns: int, first: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.num_columns = num_columns
        self.latest: torch.Tensor | None = None
        self._first = first

    def attach(self, chunks: Sequence[Any]) -> None:
        """Hook the model chunks of this rank and widen its messages; hooks stay through moves.

        Args:
            chunks: `ModelChunk`s.
        """
        global _num_columns
        _num_columns = self.num_columns
        for chunk in chunks:
            block = chunk.block
            if block.pre_process:
                chunk.core.register_forward_pre_hook(self._read_tokens, with_kwargs=True)
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            if not block.post_process:
                block.register_forward_hook(self._leave)

    def _read_tokens(self, core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs["input_ids"]
        self.latest = self._first(tokens)

    def _enter(
        self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the columns off what came from the stage before and hand both to the layers."""
        if not block.pre_process:
            received = block.input_tensor
            hidden_size = received.shape[-1] - self.num_columns
            self.latest = received.detach()[..., hidden_size:].to(torch.uint8)
            # The layers compute on the same memory layout in every layout of the pipeline.
            block.input_tensor = received[..., :hidden_size].contiguous()
        return args, {**kwargs, "context": self.latest}

    def _leave(self, block: Any, args: tuple[Any, ...], hidden: torch.Tensor) -> torch.Tensor:
        """Put the columns beside what goes to the next stage."""
        assert self.latest is not None
        return torch.cat((hidden, self.latest.to(hidden.dtype)), dim=-1)

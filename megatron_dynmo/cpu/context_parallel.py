"""Context parallelism and latent attention for Megatron's local attention.

Megatron leaves both to TransformerEngine. Meant for tests and small runs: every rank of the
context-parallel group gathers the whole sequence, computes all of its attention and keeps its own
part, so nothing is saved but the activations outside attention.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.patching import Kind, PatchSpec


def _built_as_alone(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DotProductAttention.__init__` so that it does not ask for TransformerEngine.

    Latent attention names the widths of keys and values, which the local attention takes from the
    tensors, except for that of its output.
    """

    def __init__(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        if v_channels not in (None, config.kv_channels):
            raise ConfigError(
                f"--v-head-dim {v_channels} differs from --kv-channels {config.kv_channels}: on a "
                f"CPU give --kv-channels {v_channels} too"
            )
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = size

    return __init__


def _attention_over_all_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DotProductAttention.forward` so that each query sees the keys of every rank."""

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.config.context_parallel_size == 1:
            out: torch.Tensor = original(self, query, key, value, attention_mask, *args, **kwargs)
            return out
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        whole = [_whole_sequence(part, group) for part in (query, key, value)]
        length = whole[0].size(0)
        # The mask that came along has this rank's rows only. True hides a key.
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        context = original(self, *whole, mask, *args, **kwargs)
        return torch.cat([context.chunk(2 * group.size())[i] for i in _parts(group, group.rank())])

    return forward


def _parts(group: dist.ProcessGroup, rank: int) -> tuple[int, int]:
    """Which two of the 2 x size equal parts of a sequence Megatron gives a rank."""
    return rank, 2 * group.size() - 1 - rank


def _whole_sequence(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [sequence / size, ...] of every rank into [sequence, ...], in order."""
    ordered: list[Any] = [None] * (2 * group.size())
    for rank, two in enumerate(_Gather.apply(part, group)):
        for index, half in zip(_parts(group, rank), two.chunk(2), strict=True):
            ordered[index] = half
    return torch.cat(ordered)


class _Gather(torch.autograd.Function):
    """A tensor of every rank; torch's own all_gather takes group ranks for global ones on gloo."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = torch.stack(gradients)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


def context_parallel_specs() -> tuple[PatchSpec, ...]:
    """Return the patches of Megatron's local attention."""
    target = "megatron.core.transformer.dot_product_attention:DotProductAttention"
    return (
        PatchSpec(
            name="cpu-context-parallel-init",
            target=f"{target}.__init__",
            kind=Kind.WRAP,
            factory=_built_as_alone,
            params=(
                "self",
                "config",
                "layer_number",
                "attn_mask_type",
                "attention_type",
                "attention_dropout",
                "softmax_scale",
                "cp_comm_type",
                "pg_collection",
            ),
            reason="it refuses context parallelism and does not know the arguments of latent "
            "attention, which TransformerEngine alone does on a GPU",
            seam_tried="a layer spec of our own: the user's specs would not get it",
            remove_when="local attention supports context parallelism",
        ),
        PatchSpec(
            name="cpu-context-parallel-forward",
            target=f"{target}.forward",
            kind=Kind.WRAP,
            factory=_attention_over_all_parts,
            params=(
                "self",
                "query",
                "key",
                "value",
                "attention_mask",
                "attn_mask_type",
                "attention_bias",
                "packed_seq_params",
            ),
            reason="it sees the keys of its own part of the sequence only",
            seam_tried="a layer spec of our own: the user's specs would not get it",
            remove_when="local attention supports context parallelism",
        ),
    )

"""Hash attention in the place of a layer's core attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_dynmo.dynamics.sparse_attention.hash_attention import hash_attention
from megatron_dynmo.dynamics.sparse_attention.hash_codes import Hashing, hash_codes, rotations
from megatron_dynmo.errors import ConfigError

# Megatron has no such class where TransformerEngine is not installed.
_TE_CORE: Any = getattr(transformer_engine, "TEDotProductAttention", None)
KNOWN_CORES = tuple(core for core in (DotProductAttention, _TE_CORE) if isinstance(core, type))


class SparseCore:
    """What a layer's core attention does instead of its own forward.

    The module stays what Megatron built, with its parameters and its name in checkpoints.

    Args:
        attention: the layer's `self_attention`.
        layer_number: 1-based global number.
        hashing: tells how to hash; asked in every pass, so recomputation finds the same.
        count: told the scores computed (int64 tensor) and those of causal attention, in training.

    Raises:
        ConfigError: The layer has another kind of attention.
    """

    def __init__(
        self,
        attention: Any,
        layer_number: int,
        hashing: Callable[[], Hashing],
        count: Callable[[Tensor, int], None],
    ) -> None:
        core: Any = getattr(attention, "core_attention", None)
        is_known = isinstance(core, KNOWN_CORES)
        if not is_known or getattr(attention, "attn_mask_type", None) != AttnMaskType.causal:
            raise ConfigError(
                f"layer {layer_number} has {type(attention).__name__} with "
                f"{type(core).__name__}; --dynmo-sparse-attention replaces causal dot product "
                "attention only: choose the layers that have it by "
                "--dynmo-sparse-attention-buckets N@LAYERS"
            )
        self._attention = attention
        self._core = core
        self._dense = core.forward
        self._layer_number = layer_number
        self._hashing = hashing
        self._count = count
        self._directions: tuple[Hashing, Tensor] | None = None
        core.forward = self

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Tensor:
        """Attend as `DotProductAttention.forward` does.

        Args:
            query: `[s, b, heads, head_dim]`.
            key: `[s, b, groups, head_dim]`.
            value: `[s, b, groups, value_dim]`.
            attention_mask: causal; not read.
            attn_mask_type: causal.
            attention_bias: None.
            packed_seq_params: None.
            **options: of TransformerEngine's attention.

        Returns:
            `[s, b, heads * value_dim]`.
        """
        hashing = self._hashing()
        if hashing.buckets == 1:
            dense: Tensor = self._dense(
                *(query, key, value, attention_mask),
                attn_mask_type=attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
                **options,
            )
            return dense
        if packed_seq_params is not None or attention_bias is not None:
            raise ConfigError(
                "--dynmo-sparse-attention: the layer was called with packed sequences or a bias of "
                "attention, which buckets do not keep; leave out what asks for them"
            )
        assert query.shape[0] == key.shape[0], "training only: no keys of a cache"
        length, batch, heads, _ = query.shape
        groups = key.shape[2]
        # Heads of a group follow each other, so that a group's keys are sorted and read once.
        q = query.unflatten(2, (groups, -1)).permute(1, 2, 3, 0, 4).flatten(2, 3).flatten(0, 1)
        k, v = (x.permute(1, 2, 0, 3).flatten(0, 1) for x in (key, value))
        directions = self._drawn(hashing, groups, query.shape[-1], query.device)
        directions = directions.repeat(1, batch, 1, 1)
        key_codes = hash_codes(k, directions, hashing.buckets)
        query_codes = (
            key_codes.repeat(1, 1, heads // groups)
            if hashing.is_shared
            else hash_codes(q, directions, hashing.buckets)
        )
        context, computed = hash_attention(
            q, k, v, query_codes, key_codes, softmax_scale=self._softmax_scale(query)
        )
        if self._core.training:
            self._count(computed, batch * heads * length * (length + 1) // 2)
        context = context.unflatten(0, (batch, groups)).unflatten(2, (-1, length))
        return context.permute(3, 0, 1, 2, 4).flatten(2)

    def _drawn(self, hashing: Hashing, groups: int, head_dim: int, device: Any) -> Tensor:
        """This rank's random directions; drawn once an iteration."""
        if self._directions is None or self._directions[0] != hashing:
            total = self._attention.config.num_query_groups
            group = self._attention.pg_collection.tp
            # With fewer groups than ranks, ranks that share a group share its directions.
            first = group.rank() * total // group.size()
            drawn = rotations(
                *(hashing.seed, self._layer_number, hashing.iteration),
                *(total, hashing.rounds, head_dim, hashing.buckets),
            )
            self._directions = hashing, drawn[:, first : first + groups].to(device)
        return self._directions[1]

    def _softmax_scale(self, query: Tensor) -> float:
        # Latent attention has a scale of its own; a layer's own scaling by its number cancels out.
        attention = self._attention
        scale = getattr(attention, "softmax_scale", None) or attention.config.softmax_scale
        return float(scale or query.shape[-1] ** -0.5)

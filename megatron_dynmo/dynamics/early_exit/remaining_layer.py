"""A transformer layer of Megatron run on the tokens that remain, from the layer's own parts.

Equals the layer whose output is replaced by its input for tokens that have left, but computes less:
queries, attention, projection and MLP for the remaining tokens alone; the layer norm, keys and
values for all, because later tokens attend to those that have left.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_dynmo.dynamics.early_exit.exiting import Remaining, attend

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run_remaining(
    layer: Any,
    hidden: torch.Tensor,
    remaining: Remaining,
    rotary_pos_emb: Any = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a layer for some tokens.

    Args:
        layer: a TransformerLayer with Megatron's SelfAttention and its own core attention.
        hidden: [s_l, b, h], input of all tokens.
        remaining: at least one token.
        rotary_pos_emb: as the layer gets it.
        attention_mask: as the layer gets it.

    Returns:
        [m, 1, h], output of the rows in `remaining.rows`.

    Collective:
        As the layer: all ranks of the tensor-parallel group.
    """
    attention = layer.self_attention
    normed = layer.input_layernorm(hidden)
    query, key, value = _query_key_value(attention, normed, remaining)
    query, key = _rotated(attention, query, key, remaining, rotary_pos_emb)
    context = _attended(attention, query, key, value, remaining, attention_mask)
    if remaining.spread is not None:
        context = context.index_select(0, remaining.spread)
    projected = attention.linear_proj(context.unsqueeze(1))
    with layer.bias_dropout_add_exec_handler():
        add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
        attended = add(projected, remaining.select(hidden), layer.hidden_dropout)
    return layer._forward_mlp(attended)


def _query_key_value(attention: Any, normed: torch.Tensor, remaining: Remaining) -> Parts:
    """Return queries [n, heads, d] of the remaining tokens, keys and values [s, b, groups, d]."""
    if not _can_split(attention):
        query, key, value = attention.get_query_key_value_tensors(normed)
        return query.flatten(0, 1).index_select(0, remaining.flat), key, value
    group, config = attention.pg_collection.tp, attention.config
    if config.sequence_parallel:
        whole = gather_from_sequence_parallel_region(normed, group=group)
    else:
        whole = copy_to_tensor_model_parallel_region(normed, group=group)
    head, groups = (
        attention.hidden_size_per_attention_head,
        attention.num_query_groups_per_partition,
    )
    # Rows of the fused weight: for each group its queries, its key and its value.
    queries = attention.num_attention_heads_per_partition // groups * head
    linear = attention.linear_qkv
    weight = linear.weight.unflatten(0, (groups, -1))
    bias = None if linear.bias is None else linear.bias.unflatten(0, (groups, -1))

    def project(tokens: torch.Tensor, rows: slice) -> torch.Tensor:
        of_bias = None if bias is None else bias[:, rows].flatten()
        return F.linear(tokens, weight[:, rows].flatten(0, 1), of_bias)

    tokens = whole.flatten(0, 1).index_select(0, remaining.flat)
    query = project(tokens, slice(0, queries)).unflatten(-1, (-1, head))
    key, value = project(whole, slice(queries, None)).unflatten(-1, (groups, 2 * head)).chunk(2, -1)
    if attention.q_layernorm is not None:
        query = attention.q_layernorm(query)
    if attention.k_layernorm is not None:
        key = attention.k_layernorm(key)
    return query, key, value


def _can_split(attention: Any) -> bool:
    """Whether queries can be projected without keys and values, by rows of the fused weight.

    Not where the weight's gradient is accumulated inside the projection's own kernel, nor where
    something else stands in its place.
    """
    linear, config = attention.linear_qkv, attention.config
    return (
        type(linear) is ColumnParallelLinear
        and not linear.gradient_accumulation_fusion
        and config.num_query_groups >= attention.world_size
    )


def _rotated(
    attention: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    remaining: Remaining,
    rotary_pos_emb: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn queries and keys by their positions, as the attention would."""
    config = attention.config
    if config.no_rope_freq and config.no_rope_freq[attention.layer_number - 1]:
        rotary_pos_emb = None
    if rotary_pos_emb is None:
        return query, key
    both = isinstance(rotary_pos_emb, tuple)
    of_query, of_key = rotary_pos_emb if both else (rotary_pos_emb, rotary_pos_emb)

    def turned(heads: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        if angles is None:
            return heads
        return apply_rotary_pos_emb(
            heads,
            angles,
            config=config,
            mscale=attention._yarn_concentration_factor,
            cp_group=attention.pg_collection.cp,
        )

    if of_query is not None:
        of_query = of_query.index_select(0, remaining.positions)
    return turned(query.unsqueeze(1), of_query).squeeze(1), turned(key, of_key)


def _attended(
    attention: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    remaining: Remaining,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with the scale and dropout of the layer's core attention."""
    core = attention.core_attention
    dropout = core.attention_dropout.p if core.training else 0.0
    streams: Any = contextlib.nullcontext()
    if dropout and not attention.config.sequence_parallel:
        streams = tensor_parallel.get_cuda_rng_tracker().fork()
    with streams:
        return attend(
            query,
            key,
            value,
            remaining,
            # Query-key layer scaling divides by the layer's number and multiplies again.
            scale=core.softmax_scale * (core.scale_mask_softmax.scale or 1),
            masked=attention_mask,
            dropout=dropout,
        )

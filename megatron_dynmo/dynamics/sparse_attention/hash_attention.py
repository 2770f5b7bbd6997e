"""Causal attention in which a token sees only earlier tokens of its own bucket, and itself.

Several rounds of hashing count as their union. Which codes tokens have is not decided here
(`hash_codes`): this is exact for any, and the past never depends on a later token.
"""

from __future__ import annotations

from torch import Tensor

from megatron_dynmo.dynamics.sparse_attention.block_attention import BLOCK_SIZE, block_attention
from megatron_dynmo.dynamics.sparse_attention.flex_attention import flex_hash_attention


def hash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    *,
    softmax_scale: float,
    block_size: int = BLOCK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Attend within buckets, by sorting tokens by bucket and computing the blocks that exist.

    Query t attends to key s where s is t, or s < t and their codes are equal in some round. With
    one bucket that is dense causal attention.

    Args:
        query: `[groups, T, head_dim]`; T = heads of a group times S, head after head. On CUDA
            FlexAttention's kernel does the work, elsewhere plain torch operations do.
        key: `[groups, S, head_dim]`.
        value: `[groups, S, value_dim]`.
        query_codes: `[rounds, groups, T]`, int64, at least 0.
        key_codes: `[rounds, groups, S]`.
        softmax_scale: by which scores are multiplied.
        block_size: most queries a block holds; on CUDA the kernel's own.

    Returns:
        The context `[groups, T, value_dim]` in the query's dtype, and the number of scores that
        were computed over all groups and rounds (int64, no dimension, on the query's device).
    """
    arguments = (query, key, value, query_codes, key_codes, softmax_scale)
    if query.is_cuda:
        return flex_hash_attention(*arguments)
    return block_attention(*arguments, block_size)

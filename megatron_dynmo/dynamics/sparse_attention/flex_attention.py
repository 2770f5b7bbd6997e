"""Attention within buckets through FlexAttention, PyTorch's kernel for block-sparse attention.

Each round is one call over tokens in sorted order, with a block mask made from the slices of keys
that the queries need; rounds and the token itself are joined by their log-sum-exps. Outside CUDA
the same calls run uncompiled and dense, which is only of use to check the logic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from megatron_dynmo.dynamics.sparse_attention.hash_blocks import HashOrder, hash_order

_BLOCK_SIZE = 128  # of the kernel, in both directions


def flex_hash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend within buckets; arguments and result as of `hash_attention`."""
    order = hash_order(query_codes, key_codes)
    heads = query.shape[1] // key.shape[1]
    # Every token sees itself: so no row is ever empty, whatever the hash.
    context = value.repeat(1, heads, 1).float()
    log_sum = (query.float() * key.repeat(1, heads, 1).float()).sum(-1) * softmax_scale
    num_blocks = torch.zeros((), dtype=torch.int64, device=query.device)
    for round_ in range(len(query_codes)):
        mask = block_mask(order, query_codes, key_codes, round_)
        num_blocks += mask.kv_num_blocks.sum()
        queries, keys = order.queries[round_], order.keys[round_]
        found, found_sum = _attend(
            _padded(_rows(query, queries)).unsqueeze(1),
            _padded(_rows(key, keys)).unsqueeze(1),
            _padded(_rows(value, keys)).unsqueeze(1),
            mask,
            softmax_scale,
        )
        back = queries.argsort(dim=-1)
        found = _rows(found.squeeze(1), back).float()
        found_sum = found_sum.squeeze(1).gather(1, back).float()
        total = torch.logaddexp(log_sum, found_sum)
        context = context * (log_sum - total).exp().unsqueeze(-1)
        context += found * (found_sum - total).exp().unsqueeze(-1)
        log_sum = total
    return context.to(query.dtype), num_blocks * _BLOCK_SIZE**2


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Return the context and the logarithm of the sum of every row's exponentials."""
    # The log-sum-exp was asked for by a flag before torch 2.9.
    named = hasattr(flex, "AuxRequest")
    wish = {"return_aux": flex.AuxRequest(lse=True)} if named else {"return_lse": True}
    kernel = _kernel(query.device.type)
    context, extra = kernel(query, key, value, block_mask=mask, scale=softmax_scale, **wish)
    return context, extra.lse if named else extra


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    attention: Callable[..., Any] = flex.flex_attention
    return torch.compile(attention) if device_type == "cuda" else attention


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Take rows `[groups, n, dim]` by `index` `[groups, n]`."""
    return tensor.gather(1, index.unsqueeze(-1).expand(-1, -1, tensor.shape[-1]))


def _padded(tensor: Tensor) -> Tensor:
    """Fill `[groups, n, dim]` up to whole blocks; no query sees the filling."""
    return pad(tensor, (0, 0, 0, -tensor.shape[1] % _BLOCK_SIZE))


def block_mask(order: HashOrder, query_codes: Tensor, key_codes: Tensor, round_: int) -> BlockMask:
    """Say which blocks of scores one round needs, and what is excluded inside them."""
    length = key_codes.shape[-1]
    filling = (0, -order.first.shape[-1] % _BLOCK_SIZE)
    # A filling query sees no key; its empty slice is that of the last real one's end.
    first = torch.cat((order.first[round_], order.last[round_, :, -1:].expand(-1, filling[1])), 1)
    last = torch.cat((order.last[round_], order.last[round_, :, -1:].expand(-1, filling[1])), 1)
    low = first[:, ::_BLOCK_SIZE] // _BLOCK_SIZE
    high = (last[:, _BLOCK_SIZE - 1 :: _BLOCK_SIZE] + _BLOCK_SIZE - 1) // _BLOCK_SIZE
    count = (high - low).clamp(min=0)
    step = torch.arange(-(-length // _BLOCK_SIZE), device=count.device)
    index = torch.where(step < count.unsqueeze(-1), low.unsqueeze(-1) + step, 0)
    earlier = [
        (
            pad(query_codes[e].gather(1, order.queries[round_]), filling),
            pad(key_codes[e].gather(1, order.keys[round_]), (0, -length % _BLOCK_SIZE)),
        )
        for e in range(round_)
    ]

    def sees(group: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        allowed = (column >= first[group, row]) & (column < last[group, row])
        for of_query, of_key in earlier:
            allowed = allowed & (of_query[group, row] != of_key[group, column])
        return allowed

    return BlockMask.from_kv_blocks(
        count.unsqueeze(1).int(), index.unsqueeze(1).int(), BLOCK_SIZE=_BLOCK_SIZE, mask_mod=sees
    )

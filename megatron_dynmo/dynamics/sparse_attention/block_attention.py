"""Attention over blocks of sorted tokens in plain torch operations, for any device and dtype.

Scores exist for one block at a time, in the forward and in the backward pass, so time and memory
follow the blocks and not the square of the sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_dynmo.dynamics.sparse_attention.hash_blocks import (
    Block,
    HashOrder,
    blocks_of,
    hash_order,
)

# Queries of a block: enough for a matrix product to pay, few enough to stay in a core's cache.
BLOCK_SIZE = 128
# Added to a score to exclude it: finite, because 0 * inf is no number and infinities are slow.
_EXCLUDE = -1e30
_LOG2_E = math.log2(math.e)


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    softmax_scale: float,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Attend within buckets; arguments and result as of `hash_attention`.

    Half precision is computed in float32.
    """
    order = hash_order(query_codes, key_codes)
    blocks = blocks_of(order, query_codes, block_size)
    dtype = query.dtype
    work = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    masks = _Masks(order, query_codes, key_codes, work)
    inputs = (x.to(work) for x in (query, key, value))
    context = _BlockAttention.apply(*inputs, order, blocks, masks, softmax_scale)
    area = sum(block.area for round_ in blocks for group in round_ for block in group)
    return context.to(dtype), torch.tensor(area, device=query.device)


class _Masks:
    """Excludes from a block's scores what a query must not see; holds no scores itself."""

    def __init__(
        self, order: HashOrder, query_codes: Tensor, key_codes: Tensor, dtype: torch.dtype
    ):
        # In the scores' dtype, comparing and adding is several times faster than boolean masks.
        # Places and codes are below 2**24 (a sequence that long has no CPU), so exact in float32.
        self._first = order.first.to(dtype).unsqueeze(-1)
        self._last = order.last.to(dtype).unsqueeze(-1)
        self._place = torch.arange(key_codes.shape[-1], dtype=dtype, device=key_codes.device)
        self._order = order
        self._codes = query_codes.to(dtype), key_codes.to(dtype)

    def exclude(self, scores: Tensor, block: Block, round_: int, group: int) -> None:
        """Push scores `[rows, columns]` of a block, in place, far below any real one."""
        rows, columns = block.rows, block.columns
        tail = scores[:, block.masked_from - columns.start :]
        place = self._place[block.masked_from : columns.stop]
        flag = torch.empty_like(tail)
        tail.add_(torch.ge(place, self._last[round_, group, rows], out=flag), alpha=_EXCLUDE)
        if block.masked_from == columns.start:  # of several buckets
            tail.add_(torch.lt(place, self._first[round_, group, rows], out=flag), alpha=_EXCLUDE)
        queries = self._order.queries[round_, group, rows]
        keys = self._order.keys[round_, group, columns]
        for earlier in range(round_):
            of_query = self._codes[0][earlier, group, queries].unsqueeze(1)
            of_key = self._codes[1][earlier, group, keys]
            same = torch.eq(of_query, of_key, out=torch.empty_like(scores))
            scores.add_(same, alpha=_EXCLUDE)


class _BlockAttention(torch.autograd.Function):
    """Softmax over blocks by running maxima and sums; the backward pass computes scores again.

    Source: the recurrences of FlashAttention (arXiv 2205.14135, algorithms 1 and 4); logarithms
    are to base 2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        order: HashOrder,
        blocks: list[list[list[Block]]],
        masks: _Masks,
        softmax_scale: float,
    ) -> Tensor:
        heads = query.shape[1] // key.shape[1]
        scaled = query * (softmax_scale * _LOG2_E)
        # Every token sees itself: so no row is ever empty, whatever the hash.
        context = value.repeat(1, heads, 1)
        log_sum = (scaled * key.repeat(1, heads, 1)).sum(-1, keepdim=True)
        for r, round_ in enumerate(blocks):
            for g, group in enumerate(round_):
                queries, keys = order.queries[r, g], order.keys[r, g]
                q = scaled[g].index_select(0, queries)
                k, v = key[g].index_select(0, keys), value[g].index_select(0, keys)
                out, sums = context[g].index_select(0, queries), log_sum[g].index_select(0, queries)
                for block in group:
                    rows, columns = block.rows, block.columns
                    scores = torch.mm(q[rows], k[columns].t())
                    masks.exclude(scores, block, r, g)
                    old = sums[rows]
                    top = torch.maximum(scores.amax(1, keepdim=True), old)
                    scores.sub_(top).exp2_()
                    kept = (old - top).exp2_()
                    total = scores.sum(1, keepdim=True).add_(kept)
                    out[rows].mul_(kept).addmm_(scores, v[columns]).div_(total)
                    old.copy_(total.log2_().add_(top))
                context[g].index_copy_(0, queries, out)
                log_sum[g].index_copy_(0, queries, sums)
        ctx.save_for_backward(query, key, value, context, log_sum)
        ctx.plan = order, blocks, masks, softmax_scale
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context, log_sum = ctx.saved_tensors
        order, blocks, masks, softmax_scale = ctx.plan
        heads, length = query.shape[1] // key.shape[1], key.shape[1]
        scaled = query * (softmax_scale * _LOG2_E)
        mean = (grad * context).sum(-1, keepdim=True)

        own_key, own_value = key.repeat(1, heads, 1), value.repeat(1, heads, 1)
        weight = (scaled * own_key).sum(-1, keepdim=True).sub_(log_sum).exp2_()
        slope = ((grad * own_value).sum(-1, keepdim=True) - mean).mul_(weight)
        grad_query = own_key.mul_(slope)
        grad_key = (scaled * slope).unflatten(1, (heads, length)).sum(1)
        grad_value = (grad * weight).unflatten(1, (heads, length)).sum(1)
        for r, round_ in enumerate(blocks):
            for g, group in enumerate(round_):
                queries, keys = order.queries[r, g], order.keys[r, g]
                q, d_out = scaled[g].index_select(0, queries), grad[g].index_select(0, queries)
                sums, means = log_sum[g].index_select(0, queries), mean[g].index_select(0, queries)
                k, v = key[g].index_select(0, keys), value[g].index_select(0, keys)
                dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
                for block in group:
                    rows, columns = block.rows, block.columns
                    weights = torch.mm(q[rows], k[columns].t())
                    masks.exclude(weights, block, r, g)
                    weights.sub_(sums[rows]).exp2_()
                    dv[columns].addmm_(weights.t(), d_out[rows])
                    slopes = torch.mm(d_out[rows], v[columns].t()).sub_(means[rows])
                    slopes.mul_(weights)
                    dq[rows].addmm_(slopes, k[columns])
                    dk[columns].addmm_(slopes.t(), q[rows])
                grad_query[g].index_add_(0, queries, dq)
                grad_key[g].index_add_(0, keys, dk)
                grad_value[g].index_add_(0, keys, dv)
        grads = grad_query.mul_(softmax_scale), grad_key.mul_(1 / _LOG2_E), grad_value
        return *grads, None, None, None, None

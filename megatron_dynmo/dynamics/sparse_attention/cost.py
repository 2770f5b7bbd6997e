"""What hash attention is expected to cost, before anything is measured."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_dynmo.dynamics.sparse_attention.block_attention import BLOCK_SIZE

# Its backward pass computes the scores again: five matrix products where four would do.
_BACKWARD_PRODUCTS = 5 / 4


def expected_density(buckets: int, rounds: int, seq_length: int) -> float:
    """Scores that are computed, over the scores of causal attention, if buckets are equally full.

    A query computes, in each round, half of its bucket and half of a block beyond the diagonal, but
    never less than a block, which small buckets share. One bucket is dense attention.
    """
    if buckets == 1:
        return 1.0
    bucket = seq_length / buckets
    block = min(BLOCK_SIZE, seq_length)
    scores = rounds * max(bucket / 2 + min(block, bucket) / 2, block)
    return min(scores, rounds * seq_length) / ((seq_length + 1) / 2)


def relative_times(density: float, args: Namespace) -> tuple[float, float]:
    """How long a layer's forward and backward take with this density; 1 is the untouched layer.

    Args:
        density: scores computed, over those of causal attention.
        args: Megatron's arguments, validated.
    """
    # Megatron's own attention computes the whole square of scores and remembers it for the backward
    # pass; TransformerEngine's computes the causal half and computes it again as well.
    is_local = args.transformer_impl == "local"
    work = density / 2 if is_local else density
    share = core_share(args)
    backward = work * _BACKWARD_PRODUCTS if is_local else work
    return 1 - share + share * work, 1 - share + share * backward


def core_share(args: Any) -> float:
    """Part of a layer's FLOPs that scores and their products with values are in the dense layer."""
    queries = args.kv_channels * args.num_attention_heads
    # Megatron's default is one group, which means nothing without GQA.
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    keys = args.kv_channels * groups
    seen = args.seq_length if args.transformer_impl == "local" else (args.seq_length + 1) / 2
    core = 2 * seen * queries
    projections = args.hidden_size * 2 * (queries + keys)
    if args.num_experts:
        width = (args.moe_ffn_hidden_size or args.ffn_hidden_size) * args.moe_router_topk
        width += args.moe_shared_expert_intermediate_size or 0
    else:
        width = args.ffn_hidden_size
    mlp = args.hidden_size * width * (3 if args.swiglu else 2)
    return core / (core + projections + mlp)

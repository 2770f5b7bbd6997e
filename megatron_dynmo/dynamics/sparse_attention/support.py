"""Under which of a run's features attention cannot be sparse, with the reason and the remedy."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_dynmo.config import DynMoConfig

# (attribute of Megatron's arguments, its neutral values, how the user turned it on, why not)
_FEATURES: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    (
        "context_parallel_size",
        (1,),
        "--context-parallel-size",
        "tokens of a bucket lie on all ranks, which exchange only parts of a sequence in order",
    ),
    (
        "attention_dropout",
        (0, 0.0),
        "--attention-dropout above 0",
        "weights exist only inside blocks, so masks would depend on the hash; give "
        "--attention-dropout 0",
    ),
    ("window_size", (), "--window-size", "buckets would have to be cut by distance as well"),
    (
        "softmax_type",
        ("vanilla",),
        "--softmax-type",
        "attention sinks take part in the softmax of all keys",
    ),
    (
        "reset_attention_mask",
        (),
        "--reset-attention-mask",
        "the mask of documents is not read: a token would attend across their borders",
    ),
    ("sft", (), "--sft", "packed sequences have borders that sorting by bucket does not keep"),
    (
        "sequence_packing_scheduler",
        (),
        "--sequence-packing-scheduler",
        "packed sequences have borders that sorting by bucket does not keep",
    ),
    (
        "dataloader_inter_document_masking",
        (),
        "--dataloader-inter-document-masking",
        "the mask of documents is not read: a token would attend across their borders",
    ),
    ("qk_clip", (), "--qk-clip", "it needs the largest of all scores, most of which do not exist"),
    (
        "log_max_attention_logit",
        (),
        "--log-max-attention-logit",
        "it needs the largest of all scores, most of which do not exist",
    ),
    (
        "fp8_dot_product_attention",
        (),
        "--fp8-dot-product-attention",
        "blocks are computed in half or single precision",
    ),
    (
        "fp8_multi_head_attention",
        (),
        "--fp8-multi-head-attention",
        "blocks are computed in half or single precision",
    ),
    (
        "experimental_attention_variant",
        (),
        "--experimental-attention-variant",
        "only dot product attention is replaced",
    ),
    (
        "cuda_graph_impl",
        ("none",),
        "--cuda-graph-impl",
        "which blocks exist differs from one micro-batch to the next, a captured graph does not",
    ),
    (
        "enable_cuda_graph",
        (),
        "--enable-cuda-graph",
        "which blocks exist differs from one micro-batch to the next, a captured graph does not",
    ),
    (
        "external_cuda_graph",
        (),
        "--external-cuda-graph",
        "which blocks exist differs from one micro-batch to the next, a captured graph does not",
    ),
)


def refusals(config: DynMoConfig, args: Namespace) -> list[str]:
    """See `Dynamic.refusals`."""
    found = [
        f"{flag} does not go with sparse attention: {reason}"
        for name, neutral, flag, reason in _FEATURES
        if getattr(args, name, None) not in (None, False, *neutral)
    ]
    if "early_exit" in config.dynamics:
        found.append(
            "--dynmo-early-exit runs attention for the remaining queries by itself, and would "
            "leave it dense; use one of the two"
        )
    return found

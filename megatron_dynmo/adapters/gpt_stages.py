"""Which stages hold embeddings and multi-token prediction, and which read data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage


def has_mtp_layers(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """Whether this rank's model chunk holds multi-token-prediction layers.

    Args:
        args: Megatron's validated arguments.
        vp_stage: Virtual stage of the chunk, None without virtual stages.
    """
    # Building a TransformerConfig costs milliseconds, once per micro-batch; few models need it.
    if args.mtp_num_layers is None:
        return False
    config: Any = core_transformer_config_from_args(args)
    return bool(
        mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def reads_data(vp_stage: int | None, is_packed: bool) -> bool:
    """Whether this rank reads the data set for a model chunk.

    Args:
        vp_stage: Virtual stage of the chunk, None without virtual stages.
        is_packed: Whether sequences are packed, so that every stage needs document boundaries.
    """
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return (
        is_packed
        or is_first_or_last_pipeline_stage(vp_stage)
        or has_mtp_layers(get_args(), vp_stage)
    )


def get_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the global ranks of a pipeline that hold a copy of the word embedding.

    Args:
        pp_ranks: Global ranks of the pipeline's stages, in order.

    Returns:
        The first stage, the last one if it shares the embedding, and those with multi-token
        prediction; ascending.
    """
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        if args.mtp_num_layers is not None:
            ranks.update(get_mtp_ranks(list(pp_ranks), core_transformer_config_from_args(args)))
    return sorted(ranks)

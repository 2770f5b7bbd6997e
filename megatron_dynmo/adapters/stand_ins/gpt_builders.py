"""Stand-in for the repository-root module `gpt_builders`: one pipeline stage of a GPT."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import print_rank_0
from megatron.training.argument_utils import gpt_config_from_args


def gpt_builder(
    args: argparse.Namespace,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build this rank's model chunk, unwrapped.

    Args:
        args: Megatron's parsed and validated arguments.
        pre_process: Whether the chunk holds the embedding.
        post_process: Whether the chunk holds the output layer.
        vp_stage: Virtual stage, None without virtual stages.
        config: TransformerConfig to use instead of the one in `args`.
        pg_collection: Process groups; by default those of `parallel_state`.

    Returns:
        The chunk on the device that Megatron's own builder chooses.
    """
    print_rank_0("building GPT model ...")
    model_config = gpt_config_from_args(args, config=config)
    builder = model_config.get_builder_cls()(model_config)
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return builder.build_model(
        pg_collection, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
    )

"""Resuming under the layout that was in force when a checkpoint was saved.

Megatron stores its arguments in a checkpoint, and a move keeps `pipeline_model_parallel_layout`
there up to date. Megatron itself never reads it back; without that, a run would resume with its
default split, and the distributed optimizer's shards, cut by layer, would not fit.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.training.checkpointing import (
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    read_metadata,
)

from megatron_dynmo.errors import LayoutError
from megatron_dynmo.layout import LayerLayout

logger = logging.getLogger(__name__)


def restore_layout(args: Namespace) -> None:
    """Take the layout of the checkpoint that will be loaded, unless the user gave one.

    A layout for another number of stages is left alone, with one line that says so.

    Args:
        args: parsed, not validated; `pipeline_model_parallel_layout` is set.
    """
    if args.load is None or args.pipeline_model_parallel_layout is not None:
        return
    text = _saved_layout(args)
    if text is None:
        return
    stages = args.pipeline_model_parallel_size
    try:
        layout = LayerLayout.from_megatron(text, num_layers=args.num_layers, num_stages=stages)
    except LayoutError as error:
        logger.warning("the layout %s of the checkpoint is not used: %s", text, error)
        return
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        setattr(args, name, None)  # how the run began; Megatron refuses them beside a layout
    args.account_for_embedding_in_pipeline_split = False
    args.account_for_loss_in_pipeline_split = False
    args.num_layers_per_virtual_pipeline_stage = None
    args.num_virtual_stages_per_pipeline_rank = None
    args.pipeline_model_parallel_layout = layout.to_megatron()
    logger.info("resuming under the layout of the checkpoint, %s", layout)


def _saved_layout(args: Namespace) -> str | None:
    """Layout string in a checkpoint; None where there is none or it was Megatron's default."""
    tracker = get_checkpoint_tracker_filename(args.load)
    if not Path(tracker).is_file():
        return None  # Megatron says what it makes of that
    iteration, release = read_metadata(tracker)
    step = getattr(args, "ckpt_step", None) or iteration
    folder = get_checkpoint_name(args.load, step, release, return_base_dir=True)
    try:
        if not dist_checkpointing.check_is_distributed_checkpoint(folder):
            return None
        saved = dist_checkpointing.load_common_state_dict(folder).get("args")
    except (CheckpointingException, OSError) as error:
        logger.warning("cannot read the layout of the checkpoint in %s: %s", folder, error)
        return None
    text = getattr(saved, "pipeline_model_parallel_layout", None)
    return str(text) if text is not None else None

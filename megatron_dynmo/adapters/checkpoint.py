"""Resuming under the layout that was in force when a checkpoint was saved.

Megatron stores its arguments in a checkpoint, and a move keeps `pipeline_model_parallel_layout`
there up to date. Megatron itself never reads it back; without that, a run would resume with its
default split, and the distributed optimizer's shards, cut by layer, would not fit.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError

import orjson
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.training.checkpointing import (
    find_checkpoint_rank_0,
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    read_metadata,
)

from megatron_dynmo.adapters.layout import SPLIT_ARGUMENTS, START_LAYOUT
from megatron_dynmo.errors import ConfigError, LayoutError
from megatron_dynmo.layout import LayerLayout

logger = logging.getLogger(__name__)

# Attribute of Megatron's arguments: what decisions rest on, as JSON text.
MEMORY = "dynmo_memory"
# The same: the state of all dynamics, as JSON text; only runs with dynamics have one.
DYNAMICS = "dynmo_dynamics"
# The same: whether the layers in it are stored one by one, because a dynamic made them unlike.
LAYERS_APART = "dynmo_layers_apart"
# Kinds that change nothing of a step: a run may go on without them.
WATCHING = frozenset({"moe"})


def restore_memory(args: Namespace, saved: Namespace | None) -> None:
    """Take what the saved run had measured and learned, if the checkpoint that is loaded has it.

    Args:
        args: parsed; the text is put where it will be saved from again.
        saved: what `saved_arguments` found.
    """
    memory = getattr(saved, MEMORY, None)
    if isinstance(memory, str) and not args.finetune:
        setattr(args, MEMORY, memory)


def restore_dynamics(args: Namespace, saved: Namespace | None, kinds: Sequence[str]) -> None:
    """Take the state of the dynamics from the checkpoint that is loaded, if it has one.

    Args:
        args: parsed; the text is put where it will be saved from again.
        saved: what `saved_arguments` found.
        kinds: the dynamics of this run.

    Raises:
        ConfigError: This run has no dynamics: it would go on with another model, unnoticed where
            the weights fit.
    """
    text = getattr(saved, DYNAMICS, None)
    if not isinstance(text, str) or args.finetune:
        if getattr(saved, LAYERS_APART, False):
            _take_weights_alone(args, text)
        return
    if kinds:
        setattr(args, DYNAMICS, text)  # the rest is checked where it is taken up
        return
    try:
        names = sorted({*orjson.loads(text)} - WATCHING)
    except (ValueError, TypeError):
        names = ["dynamics"]
    if names:
        weights = "" if "pruning" in names else ", or take only the weights with --finetune"
        raise ConfigError(
            f"the checkpoint in {args.load} was saved with {' and '.join(names)} in use; give the "
            f"same flags again{weights}"
        )


def _take_weights_alone(args: Namespace, text: str | None) -> None:
    """Have the weights of a checkpoint read in the form in which dynamics had them saved.

    Args:
        args: parsed; told the form.
        text: state of the dynamics; None of a run that went on without them from such a checkpoint.

    Raises:
        ConfigError: They fit no model but a pruned one.
    """
    if text is not None and "pruning" in orjson.loads(text):
        raise ConfigError(
            f"--finetune: the checkpoint in {args.load} holds pruned layers, whose weights alone "
            "fit no model; go on from it with the flags that it was saved with"
        )
    setattr(args, LAYERS_APART, True)
    # Megatron's own name for it; its configuration is made of the arguments.
    args.hetereogenous_dist_checkpoint = True


def restore_layout(args: Namespace, saved: Namespace | None) -> None:
    """Take the layout of the checkpoint that will be loaded, unless the user wants another.

    The same command line as at the start of the run counts as no wish. A layout for another number
    of stages is left alone, with one line that says so.

    Args:
        args: parsed, not validated; `pipeline_model_parallel_layout` is set.
        saved: what `saved_arguments` found.
    """
    text = getattr(saved, "pipeline_model_parallel_layout", None)
    started_with = getattr(saved, START_LAYOUT, None)
    if saved is None or text is None:
        return
    if args.pipeline_model_parallel_layout not in (None, started_with):
        return
    stages = args.pipeline_model_parallel_size
    saved_stages = getattr(saved, "pipeline_model_parallel_size", stages)
    if saved_stages != stages:
        # Its text might be read as virtual stages of fewer ranks.
        logger.warning(
            "the layout %s of the checkpoint is not used: it is for %d stages, this run has %d",
            text,
            saved_stages,
            stages,
        )
        return
    num_layers = int(args.num_layers or saved.num_layers)  # --use-checkpoint-args
    try:
        layout = LayerLayout.from_megatron(str(text), num_layers=num_layers, num_stages=stages)
    except LayoutError as error:
        logger.warning("the layout %s of the checkpoint is not used: %s", text, error)
        return
    # How the run began; Megatron refuses these beside a layout.
    for name, neutral in SPLIT_ARGUMENTS.items():
        setattr(args, name, neutral)
    args.num_layers_per_virtual_pipeline_stage = None
    args.num_virtual_stages_per_pipeline_rank = None
    args.pipeline_model_parallel_layout = layout.to_megatron()
    if hasattr(saved, START_LAYOUT):
        setattr(args, START_LAYOUT, started_with)
    logger.info("resuming under the layout of the checkpoint, %s", layout)


def require_same_buckets(args: Namespace, saved: Namespace | None, by_layer: bool) -> None:
    """Refuse a checkpoint whose distributed-optimizer state was cut otherwise than it will be.

    Balance mode and dynamics give every layer a bucket of its own, stock Megatron does not.
    Megatron's default format stores the state bucket by bucket; the fully reshardable one stores it
    by parameter and suits every mode, layout and number of stages.

    Args:
        args: parsed, not validated.
        saved: what `saved_arguments` found.
        by_layer: whether this run gives every layer a bucket of its own.

    Raises:
        ConfigError: Names both ways and what helps.
    """
    if not args.use_distributed_optimizer or args.no_load_optim or args.finetune:
        return
    if saved is None or not getattr(saved, "use_distributed_optimizer", False):
        return
    was_by_layer = getattr(saved, "dynmo_mode", None) == "balance" or bool(
        getattr(saved, DYNAMICS, None)
    )
    is_by_parameter = getattr(saved, "dist_ckpt_optim_fully_reshardable", False)
    if was_by_layer == by_layer or is_by_parameter:
        return
    cut = "a bucket for each layer" if was_by_layer else "Megatron's own buckets"
    # Not off: Megatron alone saves the format that every mode loads, but shifted.
    other = "balance" if was_by_layer else "observe"
    dynamics = " with dynamics" if by_layer and args.dynmo_mode == "observe" else ""
    without = " and without dynamics" if dynamics else ""
    raise ConfigError(
        f"the distributed optimizer's state in {args.load} is stored in {cut}, which --dynmo-mode "
        f"{'balance' if args.dynmo_mode == 'balance' else 'observe'}{dynamics} cannot load; go on "
        f"with --dynmo-mode {other}{without} and save once with "
        "--dist-ckpt-optim-fully-reshardable, which every mode can load, or take only the weights "
        "with --no-load-optim"
    )


def saved_arguments(args: Namespace) -> Namespace | None:
    """Megatron's arguments in the checkpoint that will be loaded; None where there is none.

    Args:
        args: parsed, not validated.
    """
    if args.load is None:
        return None
    step, release = _iteration_in(args.load)
    step = getattr(args, "ckpt_step", None) or step
    root = args.load
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        # Megatron takes these wherever they are not older.
        other = args.non_persistent_global_ckpt_dir or str(Path(args.load) / "non_persistent")
        if _iteration_in(other)[0] >= step:
            root, (step, release) = other, _iteration_in(other)
    if step < 0:
        return None  # Megatron says what it makes of that
    folder = get_checkpoint_name(root, step, release, return_base_dir=True)
    try:
        if dist_checkpointing.check_is_distributed_checkpoint(folder):
            saved = dist_checkpointing.load_common_state_dict(folder).get("args")
        else:
            # One file a rank (`--ckpt-format torch`), of which only the arguments are read.
            name = find_checkpoint_rank_0(root, step, release)
            if name is None:
                return None
            # Megatron has registered its classes as safe, and needs them when it loads: torch's
            # `safe_globals` would take them away again.
            saved = torch.load(name, map_location="cpu", mmap=True, weights_only=True)["args"]
    except (CheckpointingException, OSError, RuntimeError, KeyError, UnpicklingError) as error:
        logger.warning("cannot read the arguments in the checkpoint %s: %s", folder, error)
        return None
    return saved if isinstance(saved, Namespace) else None


def _iteration_in(folder: str) -> tuple[int, bool]:
    """Iteration of the latest checkpoint, -1 without one, and whether it is a release."""
    tracker = get_checkpoint_tracker_filename(folder)
    return read_metadata(tracker) if Path(tracker).is_file() else (-1, False)

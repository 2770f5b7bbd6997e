"""What `dynmo doctor` finds out about a Megatron command line: can layers of such a run be moved.

Reads Megatron's own parser and nothing else: no model is built, no process group, no data.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from megatron.training.arguments import add_megatron_arguments

from megatron_dynmo.adapters import modelopt, support
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError, LayoutError
from megatron_dynmo.layout import LayerLayout


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        refused: {flag of every feature under which layers cannot be moved: whether it is in use}.
        num_layers: decoder layers; None when the line leaves it to a file.
        stages: pipeline-parallel size.
        layout: how the run starts; None where Megatron's own arithmetic decides, or where there is
            no legal one.
        reasons: why layers cannot be moved; empty when they can.
        notes: what else is worth knowing.
        gpus: number and name of this machine's GPUs; None when torch sees none.
    """

    refused: dict[str, bool]
    num_layers: int | None
    stages: int
    layout: LayerLayout | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    gpus: str | None


class _Parser(argparse.ArgumentParser):
    """Answers mistakes with a ConfigError of one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"Megatron's arguments: {message}")


def examine(words: Sequence[str], num_stages: int | None = None) -> Examination:
    """Read a command line and say what stands in the way of moving layers.

    Args:
        words: Megatron's arguments and `--dynmo-*` flags. Flags of the user's own script may be
            among them.
        num_stages: pipeline-parallel size in place of the line's.

    Raises:
        ConfigError: A flag without its value, say, or a value that Megatron does not take.
    """
    config = DynMoConfig.from_argv(words)
    args, unknown = _parser().parse_known_args(list(words))
    notes = []
    own = [word for word in unknown if word.startswith("--")]
    if own:
        notes.append(f"no flags of Megatron, left out: {', '.join(own)}")
    if num_stages is not None:
        if args.pipeline_model_parallel_size not in (1, num_stages):
            notes.append(
                f"the line has {args.pipeline_model_parallel_size} pipeline stages, "
                f"looked at are {num_stages}"
            )
        args.pipeline_model_parallel_size = num_stages
    in_use = support.refusals(args)
    reasons = [f"{feature.flag}: {feature.reason}" for feature in in_use]
    if config.mode != "balance":
        reasons.append(f"--dynmo-mode {config.mode} moves nothing")
    if args.pipeline_model_parallel_size < 2:
        reasons.append(
            "there is one pipeline stage: add --pipeline-model-parallel-size N, or try one by "
            "--stages N"
        )
    reasons += _dynamics_refused(args, config, words)
    layout = _split(args, config, reasons, notes)
    if getattr(args, "mtp_num_layers", None):
        notes.append("the last layer stays where it is: multi-token prediction hangs on it")
    return Examination(
        refused={feature.flag: feature in in_use for feature in support.UNSUPPORTED},
        num_layers=args.num_layers,
        stages=args.pipeline_model_parallel_size,
        layout=layout,
        reasons=tuple(reasons),
        notes=tuple(notes),
        gpus=f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        if torch.cuda.is_available()
        else None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = add_megatron_arguments(_Parser(allow_abbrev=False, add_help=False))
    modelopt.add_arguments(parser)
    return DynMoConfig.add_arguments(parser)


def _dynamics_refused(args: Namespace, config: DynMoConfig, words: Sequence[str]) -> list[str]:
    """What ends the run before training because of the dynamics that it asks for."""
    if not config.dynamics:
        return []
    from megatron_dynmo.dynamics.dynamics import kinds_of  # only where asked for, as in a run

    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    if on_cpu and not any(word.startswith("--transformer-impl") for word in words):
        args.transformer_impl = "local"  # as a run on a CPU adds it
    features = {f"{feature.flag}: {feature.reason}" for feature in support.refusals(args)}
    return [
        f"{kind.kind}: {text}"
        for kind in kinds_of(config)
        for text in kind.refusals(config, args)
        if text not in features  # said already
    ]


def _split(
    args: Namespace, config: DynMoConfig, reasons: list[str], notes: list[str]
) -> LayerLayout | None:
    """The layout at the start; what is wrong with it goes to `reasons`."""
    if args.yaml_cfg is not None or args.use_checkpoint_args:
        where = "--yaml-cfg" if args.yaml_cfg is not None else "--use-checkpoint-args"
        notes.append(f"{where}: the model's size is read from a file, so no split was looked at")
        return None
    if not args.num_layers:
        reasons.append("the line has no --num-layers N")
        return None
    try:
        layout = support.require_legal_split(args)
        for move in config.forced_moves:
            LayerLayout.from_megatron(
                move.layout,
                num_layers=args.num_layers,
                num_stages=args.pipeline_model_parallel_size,
            )
    except LayoutError as error:
        reasons.append(str(error))
        return None
    if layout is None and args.pipeline_model_parallel_size > 1:
        notes.append("how the layers are split is left to Megatron's own arithmetic and messages")
    return layout

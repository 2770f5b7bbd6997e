"""NVIDIA ModelOpt, which `pretrain_gpt.py` supports where `megatron.post_training` exists.

That package is in Megatron's repository but in no wheel, so it is looked for and never required.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch import Tensor

try:
    from megatron.post_training.arguments import add_modelopt_args
    from megatron.post_training.loss_func import loss_func as _modelopt_loss
    from megatron.post_training.model_builder import ModelOptModelConfig
    from megatron.post_training.utils import maybe_enable_modelopt

    IS_AVAILABLE = True
except ImportError:
    IS_AVAILABLE = False


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ModelOpt's flags, where it is installed; usable as Megatron's extra_args_provider."""
    return add_modelopt_args(parser) if IS_AVAILABLE else parser


def enable(args: argparse.Namespace) -> None:
    """Let ModelOpt set `args.modelopt_enabled` when the run or its checkpoint asks for it."""
    if IS_AVAILABLE:
        maybe_enable_modelopt(args)


def is_used(args: argparse.Namespace) -> bool:
    """Whether this run's model is ModelOpt's."""
    return IS_AVAILABLE and getattr(args, "modelopt_enabled", False)


def model_config_class() -> type[Any]:
    """The model config class of a run for which `is_used` holds."""
    return ModelOptModelConfig


def loss(loss_mask: Tensor, output_tensor: Tensor, model: Any) -> Any:
    """ModelOpt's loss of one micro-batch, as `gpt_step.loss_func` returns it."""
    return _modelopt_loss(loss_mask, output_tensor, model=model)

"""Patches of `megatron.training`: where the controller joins a run and where it acts."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from megatron_dynmo import patching
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.patching.spec import Kind, PatchSpec

logger = logging.getLogger(__name__)


def controller() -> Any:
    """The controller of the patch set in force; None in a process that only has the patches."""
    active = patching.active()
    return active.controller if active is not None else None


def _with_our_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `parse_args` so that the `--dynmo-*` group is one of Megatron's argument groups."""

    @functools.wraps(original)
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        from megatron_dynmo.adapters import arguments, help_text

        def provider(parser: Any) -> Any:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return help_text.repair_help(DynMoConfig.add_arguments(parser))

        args = original(provider, ignore_unknown_args)
        arguments.prepare(args)
        return args

    return parse_args


def _joined(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `setup_model_and_optimizer` so that the controller meets the finished model."""

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        active = controller()
        if active is not None and optimizer is not None:
            from megatron_dynmo.adapters.run import MegatronRun

            try:
                run = MegatronRun(model, optimizer, active.dynamics, scheduler)
            except ConfigError as error:
                if active.must_move or active.dynamics is not None:
                    raise
                logger.warning("%s; nothing is measured", error)
            else:
                active.join(run)
        elif active is not None and active.dynamics is not None:  # evaluated only
            from megatron_dynmo.adapters.model import chunks_of

            active.dynamics.attach(chunks_of(model))
            logger.warning(
                "evaluated only, under the state of the dynamics in the checkpoint: nothing is "
                "measured, and no events are written"
            )
        return model, optimizer, scheduler

    return setup_model_and_optimizer


def _between_iterations(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `train_step`: measure around it, act before and after it."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if (active := controller()) is None:
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        schedule = call.arguments["forward_backward_func"]
        iteration = call.arguments["iteration"] or 0

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            active.begin_schedule()
            losses = schedule(*args, **kwargs)
            active.end_schedule()
            return losses

        call.arguments["forward_backward_func"] = timed_schedule
        active.begin_iteration(iteration + 1)
        outcome = original(*call.args, **call.kwargs)
        losses, _, _, should_exit, _, grad_norm, *_ = outcome
        if not should_exit:
            active.end_iteration(iteration + 1, losses, grad_norm)
        return outcome

    return train_step


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches of the training loop."""
    return (
        PatchSpec(
            name="parse-args",
            target="megatron.training.arguments:parse_args",
            kind=Kind.WRAP,
            factory=_with_our_flags,
            params=("extra_args_provider", "ignore_unknown_args"),
            reason="the --dynmo-* flags are known to Megatron's parser and travel in checkpoints",
            seam_tried="extra_args_provider: a user's own script passes its own, or none",
            remove_when="Megatron has a registry of argument groups",
        ),
        PatchSpec(
            name="setup-model-and-optimizer",
            target="megatron.training.training:setup_model_and_optimizer",
            kind=Kind.WRAP,
            factory=_joined,
            params=(
                "model_type",
                "model_provider_func",
                "checkpointing_context",
                "cfg_container",
                "pg_collection",
            ),
            reason="the controller needs model and optimizer after they are built and loaded",
            seam_tried="post_wrap hooks of ModelConfig: they run before the optimizer exists and "
            "before a checkpoint is loaded",
            remove_when="pretrain() offers a callback with model and optimizer before training",
        ),
        PatchSpec(
            name="train-step",
            target="megatron.training.training:train_step",
            kind=Kind.WRAP,
            factory=_between_iterations,
            params=(
                "forward_step_func",
                "data_iterator",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "config",
                "forward_backward_func",
                "iteration",
                "pg_collection",
                "p2p_communicator",
            ),
            reason="decisions and moves are made between two iterations; the step's losses and "
            "gradient norm are its return value, a move counts into the iteration time that is "
            "printed, and state that follows must be there when the schedule has returned",
            seam_tried="post_training_step_callbacks: sees neither losses nor gradient norm, so "
            "this wrapper would be needed beside it",
            remove_when="Megatron calls user callbacks after a step with its losses",
        ),
    )

"""Patches for the dynamics: they shape and run layers, and what they leave out is not counted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_dynmo.patches.training import controller
from megatron_dynmo.patching.spec import Kind, PatchSpec


def _dynamic_layers(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _build_layers(self: Any) -> None:
        if (dynamics := dynamics_of_run()) is not None:
            self.submodules = dynamics.wrap_block(self.submodules)
        original(self)

    return _build_layers


def dynamics_of_run() -> Any:
    """The run's `Dynamics`, made when the first part of its model is built."""
    active = controller()
    if active is not None and active.dynamics is None:
        from megatron.training.global_vars import get_args

        from megatron_dynmo.dynamics.dynamics import Dynamics, require_supported

        require_supported(active.config, get_args())  # some come from a checkpoint, not before
        active.dynamics = Dynamics(active.config, get_args())
    return None if active is None else active.dynamics


def _flops_left(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def num_floating_point_operations(args: Any, *rest: Any, **kwargs: Any) -> Any:
        active = controller()
        if active is None or active.dynamics is None:
            return original(args, *rest, **kwargs)
        from megatron_dynmo.adapters.flops import less_skipped

        work = active.dynamics.all_work(args.num_layers)
        return less_skipped(lambda model: original(model, *rest, **kwargs), args, work)

    return num_floating_point_operations


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches that let dynamics into the layers."""
    return (
        PatchSpec(
            name="transformer-block-layers",
            target="megatron.core.transformer.transformer_block:TransformerBlock._build_layers",
            kind=Kind.WRAP,
            factory=_dynamic_layers,
            params=("self",),
            reason="a dynamic wraps the specs of the layers, whichever builder made them",
            seam_tried="a layer spec of one's own (--spec): replaces Megatron's choice of layers",
            remove_when="Megatron lets a run wrap the layer specs of any model",
        ),
        PatchSpec(
            name="training-flops",
            target="megatron.training.training:num_floating_point_operations",
            kind=Kind.WRAP,
            factory=_flops_left,
            params=(
                "args",
                "batch_size",
                "seqlen_squared_sum_in_batch",
                "total_real_tokens_in_batch",
            ),
            reason="layers count in full, whatever part of their work a dynamic leaves out, so the "
            "throughput that is printed would be too high",
            seam_tried="config: the formula reads nothing but the model's sizes",
            remove_when="Megatron asks the layers what they compute",
        ),
    )

"""Patches of the pipeline schedules: when a stage is busy.

The schedules look both functions up in their module at every call, so one wrapper each serves
GPipe, 1F1B and interleaved 1F1B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_dynmo.patches.training import controller
from megatron_dynmo.patching.spec import Kind, PatchSpec


def _measured_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        if (active := controller()) is None:
            return original(*args, **kwargs)
        vp_stage = kwargs.get("vp_stage") or 0
        with active.forward_step(vp_stage) as produced:
            output, num_tokens = original(*args, **kwargs)
            produced(output)
        return output, num_tokens

    return forward_step


def _measured_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward_step(
        input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any
    ) -> Any:
        if (active := controller()) is None:
            return original(input_tensor, output_tensor, output_tensor_grad, config)
        with active.backward_step(output_tensor):
            return original(input_tensor, output_tensor, output_tensor_grad, config)

    return backward_step


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches of the schedules."""
    module = "megatron.core.pipeline_parallel.schedules"
    return (
        PatchSpec(
            name="forward-step",
            target=f"{module}:forward_step",
            kind=Kind.WRAP,
            factory=_measured_forward,
            params=(
                "forward_step_func",
                "data_iterator",
                "model",
                "num_microbatches",
                "input_tensor",
                "forward_data_store",
                "config",
                "cp_group_size",
                "collect_non_loss_data",
                "checkpoint_activations_microbatch",
                "is_first_microbatch",
                "current_microbatch",
                "vp_stage",
                "is_last_stage",
            ),
            reason="a stage is busy from here to its return, embedding, output and loss included",
            seam_tried="module hooks: they see neither the data fetch nor the loss function",
            remove_when="the schedules report busy time themselves",
        ),
        PatchSpec(
            name="backward-step",
            target=f"{module}:backward_step",
            kind=Kind.WRAP,
            factory=_measured_backward,
            params=("input_tensor", "output_tensor", "output_tensor_grad", "config"),
            reason="a stage is busy from here to its return, weight gradients included",
            seam_tried="tensor hooks: none fires after the last weight gradient of a stage",
            remove_when="the schedules report busy time themselves",
        ),
    )

"""Patches of a run on emulated devices (`--dynmo-emulate`, for tests and benchmarks alone)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_dynmo.patching.spec import Kind, PatchSpec


def _with_times(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that starts sends and receives, so that messages carry virtual time."""

    @functools.wraps(original)
    def communicate(**arguments: Any) -> Any:
        from megatron_dynmo.adapters import emulated

        if (device := emulated.device()) is None:
            return original(**arguments)
        return device.exchange(original, **arguments)

    return communicate


def _charged_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the optimizer step, with which an iteration ends on every rank."""

    @functools.wraps(original)
    def step(self: Any) -> Any:
        from megatron_dynmo.adapters import emulated

        outcome = original(self)
        if (device := emulated.device()) is not None:
            device.end_step()
        return outcome

    return step


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches of emulated devices."""
    p2p = "megatron.core.pipeline_parallel.p2p_communication"
    messages = (
        "tensor_send_prev",
        "tensor_recv_prev",
        "tensor_send_next",
        "tensor_recv_next",
        "group",
        "prev_pipeline_rank",
        "next_pipeline_rank",
    )
    return (
        *(
            PatchSpec(
                name=name,
                target=f"{p2p}:{function}",
                kind=Kind.WRAP,
                factory=_with_times,
                params=messages,
                reason="a message between emulated devices carries its sender's virtual time",
                seam_tried="a P2PCommunicator of our own: the schedules build theirs at every call",
                remove_when="pretrain() takes a P2PCommunicator class",
            )
            for name, function in (
                ("emulated-p2p", "_p2p_ops"),
                ("emulated-batched-p2p", "_batched_p2p_ops"),
            )
        ),
        PatchSpec(
            name="emulated-optimizer-step",
            target="megatron.core.optimizer.optimizer:ChainedOptimizer.step",
            kind=Kind.WRAP,
            factory=_charged_step,
            params=("self",),
            reason="all ranks meet in the optimizer step, so there the latest virtual time counts",
            seam_tried="after train_step: the profiler has read the clock by then",
            remove_when="optimizers take hooks that run after a step on every rank",
        ),
    )

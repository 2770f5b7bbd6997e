"""Patches of a run whose ranks may leave and come back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_dynmo.patches.training import controller
from megatron_dynmo.patching.spec import Kind, PatchSpec


def _remembered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_initialize_distributed` so that the same groups can be made again later."""

    @functools.wraps(original)
    def _initialize_distributed(
        get_embedding_ranks: Any,
        get_position_embedding_ranks: Any,
        store: Any,
        skip_model_parallel_init: bool = False,
    ) -> Any:
        if (active := controller()) is not None and not skip_model_parallel_init:
            active.form_groups = functools.partial(
                original, get_embedding_ranks, get_position_embedding_ranks
            )
        return original(
            get_embedding_ranks, get_position_embedding_ranks, store, skip_model_parallel_init
        )

    return _initialize_distributed


def _with_parking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `train` so that a rank that was packed away sleeps outside of it."""

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        from megatron_dynmo.adapters.parking import train_or_park

        if (active := controller()) is None:
            return original(*args, **kwargs)
        return train_or_park(original, active, *args, **kwargs)

    return train


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches of packing."""
    return (
        PatchSpec(
            name="initialize-distributed",
            target="megatron.training.initialize:_initialize_distributed",
            kind=Kind.WRAP,
            factory=_remembered,
            params=(
                "get_embedding_ranks",
                "get_position_embedding_ranks",
                "store",
                "skip_model_parallel_init",
            ),
            reason="when ranks leave or come back, all process groups are made anew, by the same "
            "code and with the same embedding ranks as at the start",
            seam_tried="mpu.initialize_model_parallel with arguments of ours: the choice of each "
            "would be a copy of upstream's",
            remove_when="Megatron can make its groups anew for another number of ranks",
        ),
        PatchSpec(
            name="train",
            target="megatron.training.training:train",
            kind=Kind.WRAP,
            factory=_with_parking,
            params=(
                "forward_step_func",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "train_data_iterator",
                "valid_data_iterator",
                "process_non_loss_data_func",
                "config",
                "checkpointing_context",
                "non_loss_data_func",
                "inference_model",
                "p2p_communicator",
                "pg_collection",
            ),
            reason="a rank that is packed away leaves the loop, sleeps, and enters it again",
            seam_tried="an iteration that does nothing: a parked rank would take part in every "
            "collective of the loop",
            remove_when="the loop can be left and entered by itself",
        ),
    )

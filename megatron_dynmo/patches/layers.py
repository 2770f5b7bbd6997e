"""Patch of model building: the dynamics of a run shape and run its layers."""

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

        from megatron_dynmo.dynamics.dynamics import Dynamics

        active.dynamics = Dynamics(active.config, get_args())
    return None if active is None else active.dynamics


def specs() -> tuple[PatchSpec, ...]:
    """Return the patch that lets dynamics into the layers."""
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
    )

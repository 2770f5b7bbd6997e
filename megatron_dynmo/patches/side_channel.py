"""Patch of pipeline communication: messages are as wide as the side channel makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_dynmo.patching.spec import Kind, PatchSpec


@functools.cache
def _wide(communicator: Any) -> Any:
    """A P2PCommunicator that receives what the side channel's sender sends."""
    from megatron_dynmo.dynamics.side_channel import widened

    class Wide(communicator):
        def _communicate(self, *, tensor_shape: Any, **arguments: Any) -> Any:
            return super()._communicate(tensor_shape=widened(tensor_shape), **arguments)

    Wide.__name__, Wide.__qualname__ = communicator.__name__, communicator.__qualname__
    return Wide


def _expecting_columns(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.__class__ = _wide(self.__class__)

    return __init__


def specs() -> tuple[PatchSpec, ...]:
    """Return the patch of what a stage expects to receive."""
    return (
        PatchSpec(
            name="p2p-shape",
            target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.__init__",
            kind=Kind.WRAP,
            factory=_expecting_columns,
            params=("self", "pp_group", "config"),
            reason="what tokens carry beside their hidden states crosses stage boundaries with "
            "them, as more columns of the same message, so receivers expect a wider one",
            seam_tried="--variable-seq-lengths has ranks tell each other shapes: a second message "
            "and a wait for the device before each",
            remove_when="schedules ask the model for the shape of its messages",
        ),
    )

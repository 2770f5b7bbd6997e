"""Repairs of the distributed optimizer's checkpoints.

Where neither TransformerEngine nor Apex is, Megatron uses `torch.optim.Adam`, which keeps a step
count as a tensor for each parameter. The code that saves and loads it fails at three places; each
has its own patch, which changes nothing with TransformerEngine or Apex. The fully reshardable
format is saved wrong as soon as a padded bucket comes before another one, whatever the optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

from megatron_dynmo.patching import Kind, PatchSpec

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches that make a checkpoint with the distributed optimizer loadable."""
    return (
        PatchSpec(
            name="distopt-state-dict-without-state",
            target=f"{_OPTIMIZER}.state_dict",
            kind=Kind.WRAP,
            factory=_state_dict,
            params=("self",),
            reason="it asserts one common step where no parameter has a state yet: on every load, "
            "and on a rank without parameters",
            seam_tried="init_state_fn, which creates the moments: not the step, and too late",
            remove_when="state_dict() works on an optimizer without state",
        ),
        PatchSpec(
            name="distopt-own-step-tensors",
            target=f"{_OPTIMIZER}.load_state_dict",
            kind=Kind.WRAP,
            factory=_load_state_dict,
            params=("self", "state_dict"),
            reason="all parameters get one step tensor, which Adam advances once for each, and the "
            "dp_reshardable format puts the step from before the load back into it",
            seam_tried="none: the tensor is made inside the function",
            remove_when="each parameter gets the saved step in a tensor of its own",
        ),
        PatchSpec(
            name="distopt-set-states",
            target=f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
            kind=Kind.WRAP,
            factory=_set_states,
            params=("self", "model_param", "tensors"),
            reason="it demands a 'step' that the formats do not hold (KeyError), and copies into "
            "views of fp32 parameters with gradients on (RuntimeError)",
            seam_tried="none: called from inside the loaders",
            remove_when="it leaves a step that was not saved alone and copies under no_grad",
        ),
        PatchSpec(
            name="distopt-fully-reshardable-offsets",
            target=f"{_OPTIMIZER}.sharded_param_state_fully_reshardable",
            kind=Kind.WRAP,
            factory=_model_space_state,
            params=("self", "model_sharded_state_dict", "is_loading", "metadata"),
            reason="it cuts parameters at offsets that count the padding of buckets out of tensors "
            "that do not hold it: all behind the first padded bucket is saved shifted, its end as "
            "zeros",
            seam_tried="none: buffers and offsets are taken from the optimizer inside the function",
            remove_when="offsets and tensors both count padding, or neither does (upstream 504)",
        ),
    )


def _state_dict(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap `state_dict` so that an optimizer without any state has made no step yet.

    Parameters that were thawed count fewer steps than the rest; the largest count is the run's.
    """

    def state_dict(self: Any) -> dict[str, Any]:
        if not _has_own_steps():
            return original(self)
        steps = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        if not steps:
            with _placeholder(self.optimizer):
                return original(self)
        with _all_at(max(steps, key=float), self.optimizer):
            return original(self)

    return state_dict


@contextmanager
def _placeholder(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the optimizer a state for no parameter, with step 0, for the length of a block.

    Torch passes keys that are not tensors through, and upstream drops all states from its answer.
    """
    states: dict[Any, Any] = optimizer.state
    held = dict(states)
    states.clear()
    states["no parameter"] = {"step": torch.tensor(0.0)}
    try:
        yield
    finally:
        states.clear()
        states.update(held)


@contextmanager
def _all_at(step: torch.Tensor, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let all parameters have made the same number of steps, for the length of a block."""
    held = [(state, state["step"]) for state in optimizer.state.values() if "step" in state]
    for state, _ in held:
        state["step"] = step
    try:
        yield
    finally:
        for state, own in held:
            state["step"] = own


def _load_state_dict(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `load_state_dict` so that each parameter ends with the saved step as its own tensor."""

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        if _has_own_steps():
            # The original has checked that all groups were saved with the same step.
            step = state_dict["optimizer"]["param_groups"][0]["step"]
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(step, dtype=torch.float32)

    return load_state_dict


def _set_states(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the setter: a step that was not saved keeps its value, and no gradient is recorded."""

    def _set_main_param_and_optimizer_states(
        self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        if _has_own_steps():
            # Anything that is not a tensor is left alone by the original.
            tensors = {"step": None, **tensors}
        # The main parameter of an fp32 model is a view of the parameter itself.
        with torch.no_grad():
            original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def _model_space_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the save of the fully reshardable format so that its offsets leave padding out."""

    def sharded_param_state_fully_reshardable(
        self: Any,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        with _offsets_without_padding(self.buffers):
            return original(self, model_sharded_state_dict, is_loading, metadata)

    return sharded_param_state_fully_reshardable


@contextmanager
def _offsets_without_padding(buffers: Sequence[Any]) -> Iterator[None]:
    """Let buffers say where parameters are when their buckets lie side by side, for a block."""
    kept = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        shifts, unpadded = [], 0
        for bucket in buffer.buckets:
            shifts.append(unpadded - bucket.offset)
            unpadded += bucket.numel_unpadded
        buffer.param_index_map = {
            param: (start + shifts[bucket], end + shifts[bucket], bucket)
            for param, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, index_map in zip(buffers, kept, strict=True):
            buffer.param_index_map = index_map


def _has_own_steps() -> bool:
    """Whether Megatron runs torch's Adam, with a step for each parameter."""
    return not distrib_optimizer.HAVE_APEX_OR_TE

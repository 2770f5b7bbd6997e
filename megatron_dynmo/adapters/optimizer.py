"""Optimizer state of one parameter: where Megatron keeps it, how to read it and put it back.

Covers FP32Optimizer, Float16OptimizerWithFloat16Params and DistributedOptimizer inside a
ChainedOptimizer. Source: megatron/core/optimizer/{optimizer,distrib_optimizer}.py@core_v0.19.2
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

_PARAMETER_GROUPS = (
    "model_float16_groups",
    "model_fp32_groups",
    "shard_float16_groups",
    "shard_fp32_groups",
    "shard_fp32_from_float16_groups",
    "opt_group_ranges",
)
MAIN = "main_param"  # roster key of the fp32 master copy
GROUP_STEP = "step of the group"  # where fused optimizers count: in the group, not by parameter


@dataclass
class ParamState:
    """What the optimizer knows of one parameter on this rank.

    Attributes:
        tensors: `main_param` when the master copy has storage of its own, then the optimizer's
            state tensors (`exp_avg`, `exp_avg_sq`, `step`, `momentum_buffer`, ...). Captured ones
            are the optimizer's own; received ones belong to the receiver.
        scalars: state values that are no tensors.
        shard: [start, end) in the flattened parameter that this data-parallel rank holds; None
            when it holds all of it.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    shard: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Slot:
    """Where a parameter's state lives: an inner torch optimizer and its key there."""

    inner: torch.optim.Optimizer
    group: dict[str, Any]
    main: torch.Tensor
    shard: tuple[int, int] | None


class StateCodec:
    """Reads and writes per-parameter state of a ChainedOptimizer.

    Build a new one after the optimizer was rebuilt; it holds references to what it found.

    Attributes:
        moment_keys: names of the state tensors that are as large as the parameter.
    """

    def __init__(self, optimizer: Any) -> None:
        self._slots: dict[torch.Tensor, _Slot] = {}
        self._sharded: set[torch.Tensor] = set()
        self.moment_keys = _moment_keys(optimizer)
        for member in getattr(optimizer, "chained_optimizers", (optimizer,)):
            if not getattr(member, "is_stub_optimizer", False):
                self._slots.update(_slots_of(member))
                if isinstance(member, DistributedOptimizer):
                    self._sharded.update(p for b in member.buffers for p in b.params)

    def is_sharded(self, param: torch.Tensor) -> bool:
        """Whether the parameter's state is spread over its data-parallel group."""
        return param in self._sharded

    def __contains__(self, param: torch.Tensor) -> bool:
        """Whether this rank keeps state for the parameter."""
        return param in self._slots

    def shard(self, param: torch.Tensor) -> tuple[int, int] | None:
        """[start, end) of the flattened parameter that this rank keeps state for.

        None where it keeps none, and where it keeps all of a parameter that is in no shards.
        """
        slot = self._slots.get(param)
        return None if slot is None else slot.shard

    def gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """The gradient that the last step used of what this rank keeps state for, clipped.

        None for a parameter without state here. The tensor belongs to the optimizer.
        """
        slot = self._slots.get(param)
        return None if slot is None else slot.main.grad

    def steps(self) -> float:
        """The most steps that a parameter of this rank has made; -1 where steps are not counted."""
        states = (slot.inner.state.get(slot.main, {}) for slot in self._slots.values())
        return max((float(state["step"]) for state in states if "step" in state), default=-1.0)

    def set_steps(self, param: torch.Tensor, steps: float) -> None:
        """Let a parameter have made this many steps, where the optimizer counts by parameter."""
        slot = self._slots.get(param)
        if slot is None or not isinstance(slot.inner, torch.optim.Adam | torch.optim.AdamW):
            return
        if state := slot.inner.state.get(slot.main):
            state["step"] = torch.tensor(steps, dtype=torch.float32)

    def begin(self, param: torch.Tensor) -> None:
        """Give a parameter that is trained from now on the state that Adam begins with.

        Torch's Adam counts steps by parameter: a count of 0 makes its bias correction right. Other
        optimizers begin by themselves; fused ones count for all parameters of a group together.
        """
        slot = self._slots.get(param)
        if slot is None or not isinstance(slot.inner, torch.optim.Adam | torch.optim.AdamW):
            return
        main = slot.main.detach()
        slot.inner.state[slot.main] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(main),
            "exp_avg_sq": torch.zeros_like(main),
        }

    def capture(self, param: torch.nn.Parameter) -> ParamState | None:
        """Return the state of a parameter, or None where this rank keeps none for it.

        None means frozen, or another data-parallel rank's shard. No tensor is copied.
        """
        slot = self._slots.get(param)
        if slot is None:
            return None
        state = ParamState(shard=slot.shard)
        if slot.main.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
            state.tensors[MAIN] = slot.main.detach()
        for key, value in slot.inner.state.get(slot.main, {}).items():
            if isinstance(value, torch.Tensor):
                state.tensors[key] = value
            else:
                state.scalars[key] = value
        if isinstance(slot.group.get("step"), int | float):
            state.scalars[GROUP_STEP] = slot.group["step"]
        return state

    def install(self, param: torch.nn.Parameter, state: ParamState) -> None:
        """Put a state back; its tensors other than the master belong to the optimizer afterwards.

        Args:
            param: parameter of a chunk that this optimizer was built for.
            state: captured under the same shard range, on this rank or on its twin.
        """
        slot = self._slots[param]
        assert slot.shard == state.shard, (
            f"shard of {tuple(param.shape)} is {slot.shard}, the state is for {state.shard}"
        )
        tensors, scalars = dict(state.tensors), dict(state.scalars)
        if (step := scalars.pop(GROUP_STEP, None)) is not None:
            # A group that was empty on this rank has not counted.
            slot.group["step"] = max(step, slot.group.get("step") or 0)
        if "step" in tensors and not (slot.group.get("capturable") or slot.group.get("fused")):
            tensors["step"] = tensors["step"].cpu()  # where torch keeps it, also beside a GPU
        main = tensors.pop(MAIN, None)
        if main is not None and main.data_ptr() != slot.main.data_ptr():
            with torch.no_grad():
                slot.main.copy_(main.view_as(slot.main))
        if tensors or scalars:
            # Replaced as a whole: upstream's lazy initialisation must find it complete, with a
            # `step` tensor of its own for every parameter.
            slot.inner.state[slot.main] = {
                **{key: _shaped(value, slot.main) for key, value in tensors.items()},
                **scalars,
            }


def _moment_keys(optimizer: Any) -> tuple[str, ...]:
    """State keys as large as the parameter, known also before the first step."""
    config = getattr(optimizer, "config", None)
    if config is not None and config.optimizer == "sgd":
        return ("momentum_buffer",)
    if config is not None and config.optimizer == "muon":
        return ("momentum_buffer", "exp_avg", "exp_avg_sq")  # the last two where Adam helps out
    return ("exp_avg", "exp_avg_sq")


def _shaped(value: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    """Give a state tensor that is as large as the parameter the parameter's shape."""
    return value.view_as(main) if value.numel() == main.numel() and value.dim() else value


def _slots_of(member: Any) -> Iterator[tuple[torch.Tensor, _Slot]]:
    inner = member.optimizer
    if isinstance(member, DistributedOptimizer):
        for param, (group, order) in member.model_param_group_index_map.items():
            shard = member._get_model_param_range_map(param)["param"]
            owner = inner.param_groups[group]
            yield param, _Slot(inner, owner, owner["params"][order], (shard.start, shard.end))
        return
    model_of: dict[torch.Tensor, torch.Tensor] = {}
    for models, mains in zip(
        getattr(member, "float16_groups", ()),
        getattr(member, "fp32_from_float16_groups", ()),
        strict=True,
    ):
        model_of.update(zip(mains, models, strict=True))
    for owner in inner.param_groups:
        for main in owner["params"]:
            yield model_of.get(main, main), _Slot(inner, owner, main, None)


def release_parameters(optimizer: Any) -> None:
    """Let go of every parameter, state and shard; call when all that is wanted was captured.

    The distributed optimizer's fp32 shards are views inside the autograd graph. They keep the
    gradient accumulators of their parameters alive, with the hooks of the wrapper as it was, and
    a rebuilt wrapper would hook the same accumulators once more.
    """
    for member in optimizer.chained_optimizers:
        if member.optimizer is None:
            continue
        for name in _PARAMETER_GROUPS:
            if hasattr(member, name):
                setattr(member, name, [])
        for group in member.optimizer.param_groups:
            group["params"] = []
        member.optimizer.state.clear()


def rebuild_optimizer(
    optimizer: Any,
    model: Sequence[torch.nn.Module],
    args: Namespace,
    making: AbstractContextManager[Any] | None = None,
) -> None:
    """Make the optimizer fit the parameters the model holds now; per-parameter state is lost.

    The object stays the same, since the training loop holds it: its contents are replaced.
    Learning rates and other group settings, the grad scaler and the gradient-norm group flags are
    carried over, because they do not depend on which layers a rank holds.

    Args:
        optimizer: Megatron's ChainedOptimizer.
        model: Megatron's list of DDP-wrapped chunks, already rebuilt.
        args: Megatron's arguments.
        making: entered while the new optimizer is made.

    Collective:
        All ranks of the world (Megatron aligns its parameter groups over it).
    """
    from megatron.training import training

    old_members = optimizer.chained_optimizers
    _, overrides = training.get_megatron_optimizer_config(args)
    overrides = _with_mup(overrides, optimizer.config, model, args)
    with making or nullcontext():
        fresh = get_megatron_optimizer(
            optimizer.config,
            list(model),
            config_overrides=overrides,
            use_gloo_process_groups=args.use_gloo_process_groups,
        )
    for index, new in enumerate(fresh.chained_optimizers):
        _carry_over(old_members, new, index)
    kept = {k: v for k, v in vars(optimizer).items() if k in ("step", "_has_grad_norm_group_cache")}
    vars(optimizer).clear()
    vars(optimizer).update(vars(fresh))
    vars(optimizer).update(kept)


def _with_mup(overrides: Any, config: Any, model: Sequence[torch.nn.Module], args: Any) -> Any:
    """Add the learning-rate overrides of muP, as Megatron does when it sets up training."""
    if not getattr(args, "use_mup", False):
        return overrides
    from megatron.core.utils import get_model_config
    from megatron.training import training

    mup = training.get_mup_config_overrides(
        config=config,
        mup_width_mult=get_model_config(model[0]).mup_width_mult,
        optimizer_type=config.optimizer,
    )
    return {**(overrides or {}), **mup} if mup else overrides


def _carry_over(old_members: Sequence[Any], new: Any, index: int) -> None:
    """Copy what belongs to the run, not to the parameters, from the old members to a new one.

    Members and groups come in the order in which they came before, unless all parameters of one
    were frozen or are thawed, in the whole world; then they are told apart by their settings.
    """
    groups = _groups(new)
    wanted = [_identity(group) for group in groups]
    at_place = old_members[index] if index < len(old_members) else None
    if at_place is not None and [_identity(group) for group in _groups(at_place)] == wanted:
        old, known = at_place, _groups(at_place)
    else:
        old = max(
            old_members, key=lambda m: len({*wanted} & {_identity(group) for group in _groups(m)})
        )
        known = [group for member in (old, *old_members) for group in _groups(member)]
    if hasattr(old, "grad_scaler"):
        new.grad_scaler = old.grad_scaler
    if getattr(old, "_has_grad_norm_group_cache", None) is not None:
        # Finding it out again is a collective that only rebuilt ranks would enter.
        new._has_grad_norm_group_cache = dict(old._has_grad_norm_group_cache)
    for group, identity in zip(groups, wanted, strict=True):
        twin = next((g for g in known if _identity(g) == identity), None)
        if twin is not None:
            group.update({key: value for key, value in twin.items() if key != "params"})
            continue
        # Experts follow the schedule of the dense parameters; Megatron sets it after every step.
        akin = next((g for g in known if _identity(g)[1:] == identity[1:]), None)
        assert akin is not None, f"no parameter group to take the learning rate of {identity} from"
        group.update({key: akin[key] for key in ("lr", "weight_decay") if key in akin})


def _groups(member: Any) -> list[dict[str, Any]]:
    return [] if member.optimizer is None else list(member.optimizer.param_groups)


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one parameter group from another; whether it is of experts comes first."""
    keys = (key for key in param_group_identifier_keys if key != "is_expert_parallel")
    return (group.get("is_expert_parallel"), *(group.get(key) for key in keys))

"""Parameters of layers are frozen, thawed, replaced or resized between two iterations.

Megatron's wrapper and optimizer know the trainable parameters of the moment they were built. They
are rebuilt in place here, as after a move, and every parameter that stays keeps its state bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.training.async_utils import maybe_finalize_async_save

from megatron_dynmo.adapters import wrapper
from megatron_dynmo.adapters.kept_masters import KeptMasters
from megatron_dynmo.adapters.optimizer import (
    GROUP_STEP,
    MAIN,
    ParamState,
    StateCodec,
    rebuild_optimizer,
    release_parameters,
)
from megatron_dynmo.adapters.shards import assemble, data_parallel_group

if TYPE_CHECKING:
    from megatron_dynmo.adapters.stage import MegatronStage

Parameter = torch.nn.Parameter
Convert = Callable[[torch.Tensor], torch.Tensor]
Replaced = Mapping[Parameter, tuple[Parameter, Convert]]

# Attributes of a parameter that belong to the wrapper or optimizer which it was trained under.
_OF_TRAINING = ("main_grad", "main_param", "main_param_sharded", wrapper.LAYER_TAG)


@dataclass(frozen=True)
class Reformed:
    """What a reform did on this rank.

    Attributes:
        released_bytes: optimizer state and gradients of parameters that are trained no more.
        made_bytes: the same of parameters that are trained from now on.
    """

    released_bytes: int = 0
    made_bytes: int = 0


@dataclass(frozen=True, eq=False)
class _Kept:
    """A parameter that is trained, and whose state it goes on from: its own, or another's."""

    param: Parameter
    source: Parameter
    convert: Convert | None


def reform(stage: MegatronStage, change: Callable[[], Replaced | None]) -> Reformed:
    """Let `change` edit the layers of this rank, then rebuild wrapper and optimizer around them.

    `change` may switch `requires_grad` of any parameter, and put new parameters where others were.
    A new one that is in its answer goes on from the old one: `convert` is called with the whole
    master copy and with each whole moment (fp32, the old shape) and returns the same for the new
    parameter; its weights `change` has set itself. It inherits the attributes that Megatron has put
    on the old one. Any other parameter that is trained now and was not before begins with fresh
    state: moments of zero, and where the optimizer counts steps by parameter, a count of 0, so that
    its bias correction is right. (Fused optimizers count for all parameters together.) State of
    parameters that are trained no more is dropped.

    Args:
        stage: this rank's stage.
        change: see above; may be collective. None as an answer means that nothing was replaced.
            On a rank where nothing changes it does nothing.

    Collective:
        All ranks of the world, in the same iteration, also those where nothing changes.
    """
    maybe_finalize_async_save(blocking=True)
    model, chunks = stage._model, stage.chunks
    hooks_on = wrapper.hooks_on(model)
    wrapper.settle_parameters(model)
    before = [_trained(chunk.core) for chunk in chunks]
    codec = StateCodec(stage._optimizer)
    states = {param: codec.capture(param) for params in before for param in params}
    sharded = {param for param in states if codec.is_sharded(param)}
    stage._codec = None
    del codec  # it holds what is to be released
    release_parameters(stage._optimizer)

    replaced = dict(change() or {})
    after = [_trained(chunk.core) for chunk in chunks]
    kept = [
        _Kept(param, *replaced.get(param, (param, None))) for params in after for param in params
    ]
    trained, goes_on = {one.param for one in kept}, {one.source for one in kept}
    gone = [param for param in states if param not in trained]
    released = sum(_training_bytes(p, states[p]) for p in gone if p not in goes_on)
    for param in gone:
        if param not in goes_on:
            states[param] = None
    for new, (source, _) in replaced.items():
        _inherit(new, source)
    for index, chunk in enumerate(chunks):
        if list(map(id, before[index])) == list(map(id, after[index])):
            wrapper.resume_hooks([chunk.ddp], [hooks_on[index]])
            continue
        for layer in chunk.layers:
            wrapper.tag_layer(layer)
        wrapper.rebuild(
            chunk.ddp,
            gone,
            disable_bucketing=wrapper.disables_bucketing(model, index, stage._args),
            hooks_on=hooks_on[index],
        )
    for param in gone:
        _let_go(param)

    staying = [one for one in kept if one.source in states]
    unchanged = [(one.param, states[one.source]) for one in staying if one.convert is None]
    masters = KeptMasters((param, state) for param, state in unchanged if state is not None)
    rebuild_optimizer(stage._optimizer, model, stage._args, masters)
    del unchanged, masters
    begun = [one.param for one in kept if one.source not in states]
    for param in begun:
        stage.codec().begin(param)
    _restore(staying, states, sharded, stage.codec())
    made = sum(_training_bytes(param, stage.codec().capture(param)) for param in begun)
    stage.num_reforms += 1
    torch.cuda.empty_cache()
    return Reformed(released, made)


def _restore(
    staying: Sequence[_Kept],
    states: dict[Parameter, ParamState | None],
    sharded: Container[Parameter],
    codec: StateCodec,
) -> None:
    """Give every parameter that goes on from an earlier one its state.

    Args:
        staying: in an order that all data-parallel ranks share.
        states: what this rank had; emptied as it is put back.
        sharded: the parameters that were in shards.
        codec: of the rebuilt optimizer.

    Collective:
        All ranks of the data-parallel groups of sharded parameters.
    """
    together = _put_together([one for one in staying if one.source in sharded], states, codec)
    for one in staying:
        state, states[one.source] = states[one.source], None
        if one in together:
            state = _cut_anew(one, state, codec)
        elif one.convert is not None and state is not None:
            state = _converted(one, state)
        if state is not None:
            codec.install(one.param, state)


def _trained(module: torch.nn.Module) -> list[Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _inherit(new: Parameter, old: Parameter) -> None:
    """Give a new parameter what Megatron has noted on the one whose place it takes."""
    for name, value in vars(old).items():
        if name not in _OF_TRAINING and not hasattr(new, name):
            setattr(new, name, value)


def _let_go(param: Parameter) -> None:
    """Let a parameter that is trained no more hold nothing but its weights."""
    for name in _OF_TRAINING[:-1]:
        if hasattr(param, name):
            delattr(param, name)
    # The distributed optimizer lays weights out in one buffer, which a view would keep alive.
    if param.untyped_storage().nbytes() > param.numel() * param.element_size():
        param.data = param.data.clone()


def _training_bytes(param: Parameter, state: ParamState | None) -> int:
    """Bytes of a parameter's optimizer state and gradient on this rank."""
    held = list(state.tensors.values()) if state is not None else []
    grad = getattr(param, "main_grad", None)
    return sum(t.numel() * t.element_size() for t in (*held, *([] if grad is None else [grad])))


def _converted(kept: _Kept, state: ParamState) -> ParamState:
    """The state of a parameter, whole on this rank, for the one that takes its place."""
    assert kept.convert is not None and state.shard is None
    return ParamState(
        {
            key: kept.convert(value.view(kept.source.shape)) if value.dim() else value
            for key, value in state.tensors.items()
        },
        dict(state.scalars),
    )


def _put_together(
    sharded: Sequence[_Kept], states: Mapping[Parameter, ParamState | None], codec: StateCodec
) -> set[_Kept]:
    """Those whose shards must be put together, because they are not cut as they were.

    Args:
        sharded: parameters that were in shards, in an order that all data-parallel ranks share.
        states: what this rank had of them.
        codec: of the rebuilt optimizer.

    Collective:
        All ranks of the data-parallel groups of the parameters; their answers are the same.
    """
    found: set[_Kept] = set()
    for is_dense in (True, False):
        ours = [one for one in sharded if getattr(one.param, "allreduce", True) == is_dense]
        if not ours:
            continue
        flags = [
            one.convert is not None or _shard(states[one.source]) != codec.shard(one.param)
            for one in ours
        ]
        agreed = torch.tensor(flags, dtype=torch.int32, device=ours[0].param.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=data_parallel_group(ours[0].param))
        found.update(one for one, flag in zip(ours, agreed.tolist(), strict=True) if flag)
    return found


def _shard(state: ParamState | None) -> tuple[int, int] | None:
    return None if state is None else state.shard


def _cut_anew(kept: _Kept, state: ParamState | None, codec: StateCodec) -> ParamState | None:
    """This rank's new shard of a parameter's state, made from the shards of all.

    The extra memory is one tensor of the whole parameter at a time.

    Collective:
        All ranks of the parameter's data-parallel group.
    """
    source = kept.source
    group = data_parallel_group(source)
    tensors, scalars = ({}, {}) if state is None else (state.tensors, state.scalars)
    # By parameter and by group, -1 where the optimizer does not count so.
    steps = torch.tensor(
        [float(tensors.get("step", -1)), float(scalars.get(GROUP_STEP, -1))],
        dtype=torch.float64,
        device=source.device,
    )
    dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=group)
    shard = codec.shard(kept.param)
    mine: dict[str, torch.Tensor] = {}
    keys = codec.moment_keys if source.dtype == torch.float32 else (MAIN, *codec.moment_keys)
    for key in keys:
        bits = assemble(source, tensors.get(key), _shard(state), group)
        whole = bits.view(torch.float32).view(source.shape)
        if kept.convert is not None:
            whole = kept.convert(whole)
        if shard is not None:
            mine[key] = whole.reshape(-1)[shard[0] : shard[1]].clone()
    if shard is None:
        return None
    own, of_group = steps.tolist()
    if own >= 0:
        mine["step"] = torch.tensor(own, dtype=torch.float32)
    return ParamState(mine, {GROUP_STEP: int(of_group)} if of_group >= 0 else {}, shard)

"""Megatron's DistributedDataParallel wrapper: one bucket per layer, and a rebuild in place.

The wrapper's buffers, buckets and hooks are made for the parameters it saw when it was built.
After a move it is initialised again on the same object, whose identity the training loop, the
schedules and the optimizer hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import PerBufferParamLayout

LAYER_TAG = "dynmo_layer"  # attribute of a parameter: which layer object it belongs to


def tag_layer(layer: torch.nn.Module) -> None:
    """Mark a layer's parameters as one unit for bucketing; survives dtype casts of the module."""
    tag = id(layer)
    for parameter in layer.parameters():
        setattr(parameter, LAYER_TAG, tag)


def bucket_per_layer(original: Callable[..., PerBufferParamLayout]) -> Callable[..., Any]:
    """Wrap a Megatron bucket planner so that no bucket spans two layers or splits one.

    A layer's offsets inside its bucket, hence the shards of the distributed optimizer and the
    order of additions in a reduction, then depend on the layer alone and not on its neighbours:
    shards go rank to rank without re-cutting, and the numbers stay the same to the last bit.

    Args:
        original: `planner(params, bucket_size, ...)`; params in forward order.

    Returns:
        A planner of the same signature. Its bucket_size has no effect, because it differs
        between pipeline stages.
    """

    def planner(
        params: Sequence[torch.nn.Parameter], bucket_size: int | None, *args: Any, **kwargs: Any
    ) -> PerBufferParamLayout:
        # Forward order here; the planner itself goes backwards, so the last layer comes first.
        runs = [list(run) for _, run in groupby(params, key=lambda p: getattr(p, LAYER_TAG, None))]
        layouts = [original(run, None, *args, **kwargs) for run in reversed(runs)]
        return _concatenate(layouts) if layouts else original(params, None, *args, **kwargs)

    return planner


def reduce_per_bucket(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's grouping of buckets so that each bucket is reduced by itself.

    Chunks after the first are otherwise reduced in one coalesced operation, in which a layer's
    place, and so the order of additions, depends on its neighbours again.
    """

    def partition_buckets(
        buffers: Any, force_single_bucket_group: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        return original(buffers, False, *args, **kwargs)

    return partition_buckets


def _concatenate(layouts: Sequence[PerBufferParamLayout]) -> PerBufferParamLayout:
    """Put bucket layouts behind one another in one buffer."""
    index_map: dict[torch.nn.Parameter, tuple[int, int, int]] = {}
    indices: list[tuple[int, int]] = []
    unpadded: list[int] = []
    offset = 0
    for layout in layouts:
        first_bucket = len(indices)
        for param, (start, end, bucket) in layout.param_index_map.items():
            index_map[param] = (start + offset, end + offset, bucket + first_bucket)
        indices += [(start + offset, end + offset) for start, end in layout.bucket_indices]
        unpadded += layout.per_bucket_numel_unpadded
        offset = indices[-1][1]
    return PerBufferParamLayout(
        param_index_map=index_map,
        bucket_indices=indices,
        per_bucket_numel_unpadded=unpadded,
        param_indices=layouts[0].param_indices,
        num_optimizer_shards=layouts[0].num_optimizer_shards,
    )


def hooks_on(model: Sequence[DistributedDataParallel]) -> list[bool]:
    """For each chunk, whether the hooks that gather parameters in the next forward are on."""
    return [bool(ddp.remove_forward_pre_hook_handles) for ddp in model]


def settle_parameters(model: Sequence[DistributedDataParallel]) -> None:
    """Finish parameter gathers that overlap with the next forward, and take those hooks off.

    Between two iterations `param.data` is stale under --overlap-param-gather until the next
    forward gathers it. Ask `hooks_on` before, and hand its answer to `resume_hooks` or `rebuild`.

    Collective:
        All ranks of the data-parallel group.
    """
    for ddp in model:
        if ddp.remove_forward_pre_hook_handles:
            ddp.disable_forward_pre_hook(param_sync=True)
        elif ddp.use_forward_hook:
            # After the very first step Megatron has not put the hooks on yet.
            with torch.no_grad():
                ddp.start_param_sync(force_sync=True)


def resume_hooks(model: Sequence[DistributedDataParallel], were_on: Sequence[bool]) -> None:
    """Undo `settle_parameters`, also one that failed half-way, on wrappers as they were."""
    for ddp, on in zip(model, were_on, strict=True):
        if on and not ddp.remove_forward_pre_hook_handles:
            ddp.enable_forward_pre_hook()


def rebuild(
    ddp: DistributedDataParallel,
    removed: Sequence[torch.nn.Parameter],
    *,
    disable_bucketing: bool,
    hooks_on: bool,
) -> None:
    """Initialise a wrapper again for the parameters its module holds now.

    Gradients are dropped: between two iterations they have been used already and Megatron zeroes
    them before the next forward.

    Args:
        ddp: the wrapper; stays the same object.
        removed: parameters that left the module; their gradient memory is released.
        disable_bucketing: as Megatron passed it when it built the wrapper.
        hooks_on: whether the parameter-gather hooks are to be on afterwards.
    """
    config, ddp_config, module = ddp.config, ddp.ddp_config, ddp.module
    groups = getattr(module, "pg_collection", None)
    was_training = ddp.training
    # Old gradients are pinned by views and by the old optimizer until that is rebuilt too; without
    # this the peak would hold old and new together.
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        buffer.grad_data.untyped_storage().resize_(0)
    own = set(module.parameters())
    hooked = {acc.variable: acc for acc in ddp.grad_accs if acc.variable in own}
    ddp.buffers, ddp.expert_parallel_buffers = [], []
    ddp.bucket_groups, ddp.expert_parallel_bucket_groups = [], []
    ddp.param_to_bucket_group, ddp.grad_accs, ddp.params_with_grad = {}, [], []
    for param in (*module.parameters(), *removed):
        param.grad = None
        if hasattr(param, "main_grad"):
            del param.main_grad
    full_layout = _full_layout(ddp, ddp_config, module)
    with _hooked_already(module, hooked):
        type(ddp).__init__(
            ddp,
            config,
            ddp_config,
            module,
            disable_bucketing=disable_bucketing,
            pg_collection=groups,
            full_param_layout=full_layout,
        )
    ddp.grad_accs += hooked.values()
    if ddp.use_forward_hook and not hooks_on:
        ddp.disable_forward_pre_hook(param_sync=False)
    ddp.train(was_training)


@contextlib.contextmanager
def _hooked_already(module: torch.nn.Module, hooked: Container[torch.Tensor]) -> Iterator[None]:
    """Keep a wrapper that is initialised from hooking parameters which it has hooked before.

    The old hooks serve the new buckets: they ask the wrapper for them. They cannot be taken off,
    and they live as long as any graph goes through the parameter, such as that of the last
    micro-batch, which MoE token dispatchers hold on to; a second hook would find no gradient.
    Megatron takes parameters with their names for buffers, and without for hooks.
    """
    parameters = module.parameters
    module.parameters = lambda: (p for p in parameters() if p not in hooked)  # type: ignore[method-assign,assignment,misc]
    try:
        yield
    finally:
        del module.parameters


def _full_layout(ddp: DistributedDataParallel, ddp_config: Any, module: torch.nn.Module) -> Any:
    """Plan the buffers beforehand, as Megatron's model builder does."""
    if not ddp_config.use_distributed_optimizer:
        return None
    return DistributedOptimizer.compute_full_param_layout(
        [p for p in module.parameters() if p.requires_grad],
        None,
        ddp.intra_dp_cp_group.size(),
        ddp_config,
        expert_data_parallel_world_size=ddp.intra_expt_dp_group.size(),
    )


def disables_bucketing(model: Sequence[Any], chunk_index: int, args: Any) -> bool:
    """Whether Megatron turns bucketing off for a chunk of its `model` list."""
    return chunk_index > 0 or bool(getattr(args, "overlap_param_gather_with_optimizer_step", False))

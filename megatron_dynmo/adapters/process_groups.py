"""Megatron's process groups by name, and every place in a live model that holds one.

Megatron hands groups to modules, wrappers and optimizers when they are built. When the groups are
made anew, each of these attributes must name the new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dynmo.errors import MigrationError

# The place where parallel state lists every group once more, in the order they were made.
_ALL_GROUPS = "_global_process_group_list"
# Packages whose objects are looked into; all that holds groups comes from there.
_OWNERS = ("megatron", "megatron_dynmo", "transformer_engine")


def groups_by_name() -> dict[str, dist.ProcessGroup]:
    """The groups of this rank that Megatron's parallel state holds, by the name they have there."""
    found = {}
    for name, value in vars(mpu).items():
        if name == _ALL_GROUPS:
            continue
        for key, item in _items(value) if isinstance(value, list | dict) else (("", value),):
            if isinstance(item, dist.ProcessGroup):
                found[f"{name}{key}"] = item
    return found


def replace_groups(
    roots: Sequence[Any],
    old: Mapping[str, dist.ProcessGroup],
    new: Mapping[str, dist.ProcessGroup],
) -> int:
    """Let every attribute below some objects that holds an old group hold the new one.

    Args:
        roots: model chunks, optimizer and so on.
        old: groups by name, perhaps destroyed by now.
        new: groups by the same names.

    Returns:
        How many places were changed.

    Raises:
        MigrationError: A place cannot be changed, or its group is no more.
    """
    successor: dict[dist.ProcessGroup, dist.ProcessGroup | None] = {}
    for name, group in old.items():
        # Several names may mean one group; any successor will do that exists.
        successor[group] = successor.get(group) or new.get(name)
    count = 0
    for holder, places in _holders(roots):
        for key, value in _items(places):
            if not isinstance(value, dist.ProcessGroup) or value not in successor:
                continue
            replacement = successor[value]
            if replacement is None or isinstance(places, tuple):
                raise MigrationError(
                    f"{type(holder).__name__} holds a process group at {key!r} that has no "
                    "successor or cannot be replaced there"
                )
            places[key] = replacement
            count += 1
    return count


def renumber_optimizer(optimizer: Any) -> None:
    """Let a distributed optimizer's checkpoint keys name the model-parallel rank of now.

    Source: megatron/core/optimizer/__init__.py@core_v0.19.2 (data_parallel_group_idx)
    """
    experts = {group for name, group in groups_by_name().items() if "EXPERT_DATA" in name}
    for member in getattr(optimizer, "chained_optimizers", ()):
        if isinstance(member, DistributedOptimizer):
            group = (
                mpu.get_expert_tensor_model_pipeline_parallel_group(with_egtp_remat=True)
                if member.data_parallel_group in experts
                else mpu.get_model_parallel_group()
            )
            member.data_parallel_group_idx = group.rank()


def _holders(roots: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Every object and container below some objects, each once, with what it holds."""
    seen: set[int] = set()
    waiting: list[Any] = list(roots)
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        places = holder if isinstance(holder, list | tuple | dict) else vars(holder)
        yield holder, places
        waiting += [value for _, value in _items(places) if _is_looked_into(value)]


def _items(places: Any) -> list[tuple[Any, Any]]:
    return list(places.items() if isinstance(places, dict) else enumerate(places))


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, list | tuple | dict | torch.nn.Module):
        return True
    if isinstance(value, type | torch.Tensor) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] in _OWNERS

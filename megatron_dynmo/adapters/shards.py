"""Optimizer state spread over a data-parallel group, put together parameter by parameter."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu


def data_parallel_group(param: torch.nn.Parameter) -> dist.ProcessGroup:
    """The group over which the distributed optimizer cuts a parameter's state."""
    if getattr(param, "allreduce", True):
        return mpu.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    return mpu.get_expert_data_parallel_group(partial_expert_data_parallel=True)


def assemble(
    param: torch.Tensor,
    shard: torch.Tensor | None,
    where: tuple[int, int] | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Put fp32 shards together by adding bit patterns; every element is non-zero on one rank.

    Args:
        param: the parameter, for its size and device.
        shard: this rank's part; None where it holds none.
        where: [start, end) of that part in the flattened parameter.
        group: the ranks that hold the parts.

    Returns:
        The bits of the whole as int32, flat; `.view(torch.float32)` reads them.

    Collective:
        All ranks of the group.
    """
    whole = torch.zeros(param.numel(), dtype=torch.int32, device=param.device)
    if shard is not None and where is not None:
        whole[where[0] : where[1]] = shard.detach().float().contiguous().view(-1).view(torch.int32)
    dist.all_reduce(whole, group=group)
    return whole


def latest_step(
    step: torch.Tensor | None, device: torch.device, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The largest step count that any rank of a group has for a parameter; one fp32 element.

    Collective:
        All ranks of the group, where there is one.
    """
    value = torch.zeros(1, dtype=torch.float32, device=device)
    if step is not None:
        value += step.to(device).float()
    if group is not None:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value

"""Where this rank sits in Megatron's process grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu


@dataclass(frozen=True)
class Topology:
    """This rank's place, groups and device.

    The groups belong to Megatron; nothing here creates or destroys one.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        pp_rank: rank in the pipeline group.
        pp_size: pipeline stages.
        virtual_stages: model chunks on each rank.
        tp_size: tensor-parallel size.
        token_exchange_size: ranks among which MoE layers deal their tokens.
        pp_group: pipeline group.
        tp_group: tensor-parallel group.
        token_exchange_group: the group of those ranks.
        pp_global_ranks: global rank of every pipeline rank of this rank's pipeline.
        device: where parameters live and where collectives take their tensors.
    """

    rank: int
    world_size: int
    pp_rank: int
    pp_size: int
    virtual_stages: int
    tp_size: int
    token_exchange_size: int
    pp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    token_exchange_group: dist.ProcessGroup
    pp_global_ranks: tuple[int, ...]
    device: torch.device

    @classmethod
    def of_this_rank(cls) -> Topology:
        """Read Megatron's parallel state, which must be initialised."""
        pp_group = mpu.get_pipeline_model_parallel_group()
        token_exchange_group = mpu.get_expert_tensor_and_model_parallel_group()
        is_cuda = dist.get_backend() == "nccl"
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            pp_rank=mpu.get_pipeline_model_parallel_rank(),
            pp_size=mpu.get_pipeline_model_parallel_world_size(),
            virtual_stages=mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
            tp_size=mpu.get_tensor_model_parallel_world_size(),
            token_exchange_size=token_exchange_group.size(),
            pp_group=pp_group,
            tp_group=mpu.get_tensor_model_parallel_group(),
            token_exchange_group=token_exchange_group,
            pp_global_ranks=tuple(dist.get_process_group_ranks(pp_group)),
            device=torch.device("cuda", torch.cuda.current_device())
            if is_cuda
            else torch.device("cpu"),
        )

"""Pure balancing algorithms: layer costs in, boundaries out."""

from megatron_dynmo.balancers.diffusion import DiffusionResult, diffusion
from megatron_dynmo.balancers.objective import LayoutChoice, choose_layout, min_max_layout
from megatron_dynmo.balancers.partition import partition
from megatron_dynmo.balancers.virtual import VirtualPartition, partition_virtual

__all__ = [
    "DiffusionResult",
    "LayoutChoice",
    "VirtualPartition",
    "choose_layout",
    "diffusion",
    "min_max_layout",
    "partition",
    "partition_virtual",
]

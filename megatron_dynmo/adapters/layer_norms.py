"""Sums of squares over whole layers, the same on every rank to the last bit.

Each tensor is summed by itself in float64 and the sums are added exactly, so that a number does not
depend on which rank holds which layer. Tensor- and data-parallel copies count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

from megatron_dynmo import exact_sum
from megatron_dynmo.adapters.grad_norm import tensor_norms
from megatron_dynmo.adapters.stage import MegatronStage

TensorsOf = Callable[[torch.nn.Module], Sequence[torch.Tensor]]


def layer_norms(stage: MegatronStage, device: torch.device, tensors_of: TensorsOf) -> list[float]:
    """The 2-norm over some tensors of every layer of the model.

    Args:
        stage: this rank's stage.
        device: of this rank's collectives.
        tensors_of: given a layer of this rank, the tensors of which this rank is to count.

    Returns:
        One norm a layer, in order; 0 for a layer of which no rank counts a tensor.

    Collective:
        All ranks of the world: one all_reduce of int64 `[num_layers, NUM_LIMBS]`.
    """
    total = np.zeros((stage.config.num_layers, exact_sum.NUM_LIMBS), dtype=np.int64)
    for number, layer in stage.layers().items():
        tensors = list(tensors_of(layer))
        total[number - 1] += exact_sum.limbs(tensor_norms(tensors) ** 2)
    summed = torch.from_numpy(total).to(device)
    dist.all_reduce(summed)
    return [math.sqrt(exact_sum.to_float(limbs)) for limbs in summed.cpu().numpy()]


def gradient_norms(stage: MegatronStage, device: torch.device) -> list[float]:
    """The norm of every layer's gradient in the step that has just ended, after clipping.

    Collective:
        All ranks of the world.
    """
    codec = stage.codec()

    def gradients(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
        for param in layer.parameters():
            is_counted = codec.is_sharded(param) or _is_first_copy(param)
            if is_counted and param_is_not_tensor_parallel_duplicate(param):
                grad = codec.gradient(param)
                if grad is not None and grad.numel():
                    yield grad

    return layer_norms(stage, device, lambda layer: list(gradients(layer)))


def counted_parameters(layer: torch.nn.Module) -> list[bool]:
    """Of a layer's parameters in order: whether this rank counts them, so that each counts once."""
    return [
        _is_first_copy(param) and param_is_not_tensor_parallel_duplicate(param)
        for param in layer.parameters()
    ]


def _is_first_copy(param: torch.nn.Parameter) -> bool:
    """Whether this rank is the first of those that hold the same part of a parameter."""
    if getattr(param, "allreduce", True):
        return mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    return mpu.get_expert_data_parallel_rank() == 0

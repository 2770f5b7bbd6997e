"""The gradient norm without the traces of the pipeline layout.

Megatron adds squares tensor after tensor on a rank, in fp32, and then rank after rank, so moving a
layer changes the order of additions, the last bits of the norm, and through clipping every weight.
Here each tensor is summed by itself, in float64, and the sums of tensors are added exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.utils import get_data_parallel_group_if_dtensor

from megatron_dynmo import exact_sum

# Every allocator of torch starts blocks at a multiple of this many bytes, and no vector load is
# wider: a tensor that starts at such a multiple is summed as a fresh copy of it would be.
_ALIGNMENT_BYTES = 64


def exact_grad_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `get_grad_norm_fp32` so that the 2-norm does not depend on where tensors live.

    The result is the same bit for bit for any spread of the same tensors over any number of ranks
    and any order on a rank. It does depend on how a parameter is cut (tensor parallelism, shards of
    the distributed optimizer), on the kind of device, and on a CPU on the number of threads: all of
    which a move of whole layers leaves alone.

    Other norms, and gradients that are DTensors (FSDP), go to the original.

    Args:
        original: `megatron.core.optimizer.clip_grads.get_grad_norm_fp32`.

    Returns:
        A function with the same parameters, result type and collective: one all_reduce over
        `grad_stats_parallel_group` (of int64 `[exact_sum.NUM_LIMBS]`), by all its ranks, also
        those without a gradient.
    """

    @functools.wraps(original)
    def get_grad_norm_fp32(
        grads_for_norm: Sequence[torch.Tensor] | torch.Tensor,
        norm_type: int | float = 2,
        grad_stats_parallel_group: dist.ProcessGroup | None = None,
    ) -> float | torch.Tensor:
        grads = [grads_for_norm] if torch.is_tensor(grads_for_norm) else list(grads_for_norm)
        is_sharded = any(get_data_parallel_group_if_dtensor(grad) is not None for grad in grads)
        if float(norm_type) != 2.0 or is_sharded:
            return original(grads, norm_type, grad_stats_parallel_group)
        norm = math.sqrt(_sum_over_ranks(tensor_norms(grads) ** 2, grad_stats_parallel_group))
        # With TransformerEngine upstream clips by a norm that stays on the device.
        if clip_grads.multi_tensor_scale_tensor_impl is not None:
            return torch.tensor([norm], dtype=torch.float, device=torch.cuda.current_device())
        return norm

    return get_grad_norm_fp32


def tensor_norms(grads: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the 2-norm of each tensor by itself.

    Args:
        grads: Tensors of any shape and floating type, on one device; not changed. At most one
            temporary copy of the largest one is alive.

    Returns:
        float64 `[len(grads)]`, in host memory; one transfer for all tensors.
    """
    if not grads:
        return np.zeros(0)
    norms = [
        torch.linalg.vector_norm(_at_fixed_alignment(grad.detach()), dtype=torch.float64)
        for grad in grads
    ]
    return torch.stack(norms).cpu().numpy()


def _at_fixed_alignment(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient as contiguous fp32 memory that starts at a multiple of the alignment.

    Reductions on CUDA peel off what precedes the first aligned address, so the grouping of the
    additions would depend on where in a gradient buffer, that is behind which layers, a tensor
    lies. In Megatron's buffers most tensors start aligned and need no copy.
    """
    is_ready = grad.dtype is torch.float32 and grad.is_contiguous()
    if is_ready and grad.data_ptr() % _ALIGNMENT_BYTES == 0:
        return grad
    return torch.empty(grad.shape, dtype=torch.float32, device=grad.device).copy_(grad)


def _sum_over_ranks(squares: np.ndarray, group: dist.ProcessGroup | None) -> float:
    """Return the correctly rounded sum of the squares of every rank.

    Collective: one all_reduce over `group`; every rank of it must call, with or without squares.
    """
    is_cuda = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    total = torch.from_numpy(exact_sum.limbs(squares)).to(device)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return exact_sum.to_float(total.cpu().numpy())

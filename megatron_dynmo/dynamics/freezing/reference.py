"""A snapshot of a layer's weights, held by the layer: it moves and is saved with it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor

_NAME = "dynmo_reference"


class Reference(torch.nn.Module):
    """The weights of a layer as they once were, in one flat persistent buffer of their dtype.

    Args:
        layer: whose parameters, all of one dtype, give the size; their values are not taken.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        params = list(layer.parameters())
        size = sum(param.numel() for param in params)
        self.register_buffer("weights", torch.empty(size, dtype=params[0].dtype))
        self.weights: torch.Tensor
        self.weights = self.weights.to(params[0].device)

    @staticmethod
    def of(layer: torch.nn.Module) -> Reference | None:
        """The snapshot of a layer; None without one."""
        return getattr(layer, _NAME, None)

    @staticmethod
    def attach(layer: torch.nn.Module) -> Reference:
        """Give a layer a snapshot with undefined content, or return the one it has."""
        if (held := Reference.of(layer)) is None:
            held = Reference(layer)
            layer.add_module(_NAME, held)
        return held

    @staticmethod
    def drop(layer: torch.nn.Module) -> None:
        """Take a layer's snapshot away."""
        if Reference.of(layer) is not None:
            delattr(layer, _NAME)

    def take(self, layer: torch.nn.Module) -> None:
        """Copy the layer's present weights."""
        with torch.no_grad():
            for part, param in zip(self.parts(layer), layer.parameters(), strict=True):
                part.copy_(param)

    def parts(self, layer: torch.nn.Module) -> list[torch.Tensor]:
        """The snapshot of each parameter, as views in its shape."""
        params = list(layer.parameters())
        flat = self.weights.split([param.numel() for param in params])
        return [part.view(param.shape) for part, param in zip(flat, params, strict=True)]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Any = None,
    ) -> dict[str, ShardedTensor]:
        """What Megatron's checkpoints save: the part of every tensor- and expert-parallel rank.

        It is saved by layer, since not every layer has one. Such a checkpoint is loaded with the
        same tensor and expert parallelism only.
        """
        assert not sharded_offsets, "layers differ in what they save, so none may be stacked"
        tensor, expert = mpu.get_tensor_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
        num_tensor, num_expert = (
            mpu.get_tensor_model_parallel_world_size(),
            mpu.get_expert_model_parallel_world_size(),
        )
        return {
            f"{prefix}weights": ShardedTensor.from_rank_offsets(
                f"{prefix}weights",
                self.weights,
                (0, tensor * num_expert + expert, num_tensor * num_expert),
                replica_id=mpu.get_data_parallel_rank(with_context_parallel=True) // num_expert,
            )
        }

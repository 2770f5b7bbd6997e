"""Megatron's tensor-parallel linear layers with a compact weight.

The class of a live layer is replaced by a subclass of its own: it keeps everything Megatron gave
it, and computes with the non-zeros of its weight alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim,
    _reduce_scatter_along_first_dim,
)

from megatron_dynmo.dynamics.pruning.replacement import Replacement, like
from megatron_dynmo.dynamics.pruning.sparse_linear import (
    Pattern,
    Products,
    SequenceParts,
    compress,
    sparse_linear,
)

LINEAR_TYPES = (ColumnParallelLinear, RowParallelLinear)
VALUES, INDEX = "weight_values", "weight_index"


@dataclass
class Age:
    """How often the weights of a model may have changed; one object for all its layers.

    Parameters are written in ways that leave no trace on them (through the buffer that the
    distributed optimizer gathers into), so who drives the training has to count.
    """

    count: int = 0


class CompactWeight:
    """Mixed into a linear layer: parameter `weight_values` `[1, nnz]`, buffer `weight_index`.

    The values have two dimensions because Megatron takes one-dimensional parameters for biases and
    spares them weight decay. The buffer, int32 `[nnz]`, holds ascending positions in the flattened
    matrix; it moves and is saved with the layer.

    Attributes:
        dynmo_shape: rows and columns of the dense matrix on this tensor-parallel rank.
        dynmo_products: how to compute; on dense matrices unless that is changed.
        dynmo_age: counts how often the values may have changed.
    """

    dynmo_shape: tuple[int, int]
    dynmo_products: Products
    dynmo_age: Age
    weight_values: torch.nn.Parameter
    weight_index: torch.Tensor
    _dynmo_pattern: tuple[torch.Tensor, Pattern] | None
    _dynmo_dense: tuple[int, torch.Tensor, torch.Tensor | None] | None

    @property
    def weight(self) -> torch.nn.Parameter:
        """What Megatron hands to `_forward_impl` as the weight."""
        return self.weight_values

    @property
    def dynmo_pattern(self) -> Pattern:
        """Places of the values, worked out once from the buffer, which a move or a load fills."""
        if self._dynmo_pattern is None or self._dynmo_pattern[0] is not self.weight_index:
            self._dynmo_pattern = self.weight_index, Pattern(self.weight_index, *self.dynmo_shape)
            self._dynmo_dense = None
        return self._dynmo_pattern[1]

    @property
    def dynmo_bytes_beside(self) -> int:
        """Bytes that computing with the weight keeps on this rank beside parameter and buffer."""
        rows, columns = self.dynmo_shape
        products, number = self.dynmo_products, self.weight_index.itemsize
        whole = rows * columns * self.weight_values.itemsize
        kept = 0
        if not (products.forward and products.input_grad):
            kept += whole
        if products.compressed:
            kept += whole * 9 // 16
        if products.forward or products.weight_grad:  # row starts and columns
            kept += number * (rows + 1 + len(self.weight_index))
        if products.input_grad:  # the same of the transposed matrix, and an order
            kept += number * (columns + 1 + 2 * len(self.weight_index))
        return kept

    def _filled(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The dense matrix for the products that need it and its compressed form, for each age."""
        pattern, products = self.dynmo_pattern, self.dynmo_products
        if products.forward and products.input_grad:
            self._dynmo_dense = None
            return None, None
        age, matrix, compressed = self._dynmo_dense or (None, None, None)
        if age != self.dynmo_age.count or (compressed is not None) != products.compressed:
            matrix = pattern.dense(self.weight_values.detach(), out=matrix)
            compressed = compress(matrix) if products.compressed else None
            self._dynmo_dense = self.dynmo_age.count, matrix, compressed
        return matrix, compressed

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: torch.distributed.ProcessGroup | None,
        **unused: Any,
    ) -> torch.Tensor:
        """Stand in for Megatron's product; the collectives around it are the same.

        Collective:
            The tensor-parallel group where Megatron's product has one too.
        """
        parts = None
        if sequence_parallel:
            parts = SequenceParts(
                partial(_gather_along_first_dim, group=tp_group),
                partial(_reduce_scatter_along_first_dim, group=tp_group),
            )
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = sparse_linear(
            input, weight, self.dynmo_pattern, self.dynmo_products, *self._filled(), parts
        )
        return output if bias is None else output + bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Describe the tensors for a checkpoint.

        Every tensor-parallel rank stores a vector of its own, since their lengths differ.
        """
        state: dict[str, Any] = super().sharded_state_dict(  # type: ignore[misc]
            prefix, sharded_offsets, metadata
        )
        assert not sharded_offsets, "layers of a pruned model are stored one by one"
        tp_group: Any = self.tp_group  # type: ignore[attr-defined]
        for name in (VALUES, INDEX):
            key = f"{prefix}{name}"
            state[key] = ShardedTensor.from_rank_offsets(
                f"{key}.{tp_group.rank()}_of_{tp_group.size()}",
                getattr(self, name),
                replica_id=(0, 0, metadata["dp_cp_group"].rank()),
            )
        return state


@functools.cache
def _class_of(base: Any) -> type:
    return type(f"Compact{base.__name__}", (CompactWeight, base), {})


def is_compact(linear: torch.nn.Module) -> bool:
    """Whether a linear layer's weight is compact."""
    return isinstance(linear, CompactWeight)


def make_compact(linear: Any, num_values: int, age: Age) -> torch.nn.Parameter:
    """Give a linear layer room for a compact weight; its values and places are undefined.

    Args:
        linear: a ColumnParallelLinear or RowParallelLinear; its dense weight is dropped.
        num_values: non-zeros on this tensor-parallel rank.
        age: of the model's weights.

    Returns:
        The dropped weight.
    """
    dense: torch.nn.Parameter = linear.weight
    assert isinstance(linear, LINEAR_TYPES) and dense.numel() < 2**31, type(linear)
    linear.dynmo_shape = tuple(dense.shape)
    linear.dynmo_products = Products()
    linear.dynmo_age = age
    linear._dynmo_pattern = linear._dynmo_dense = None
    del linear.weight
    linear.__class__ = _class_of(linear.__class__)
    linear.register_parameter(VALUES, like(dense, dense.new_empty(1, num_values)))
    linear.register_buffer(
        INDEX, torch.empty(num_values, dtype=torch.int32, device=dense.device), persistent=True
    )
    return dense


def remove_weights(linear: Any, removed: torch.Tensor, age: Age) -> Replacement:
    """Take weights out of a linear layer.

    Args:
        linear: the layer, with a dense or a compact weight.
        removed: bool `[n]`, for each of the present values (dense: of the flattened matrix).
        age: of the model's weights.

    Returns:
        The parameter that is gone and the one in its place.
    """
    kept = (~removed).nonzero().flatten()

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1)[kept].view(1, -1)

    if is_compact(linear):
        places, old = linear.weight_index[kept], linear.weight_values
    else:
        places, old = kept.to(torch.int32), make_compact(linear, len(kept), age)
    replacement = Replacement.of(old, cut)
    linear.weight_values, linear.weight_index = replacement.new, places
    return replacement

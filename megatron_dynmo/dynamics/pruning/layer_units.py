"""Units of a layer that can be taken out whole: FFN neurons, and query groups of attention heads.

A unit is some rows of one linear layer and the columns of the next one that take in what the rows
give out. Without it both matrices are smaller, so any hardware is faster and nothing is masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_dynmo.dynamics.pruning.replacement import Replacement, like

KEPT = "dynmo_kept"  # submodule of the MLP or attention that says which units are left


class KeptUnits(torch.nn.Module):
    """Which units are left: int32 `[n]`, ascending numbers in the whole layer as it was built."""

    ids: torch.Tensor

    def __init__(self, ids: torch.Tensor, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.register_buffer("ids", ids.to(torch.int32), persistent=True)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Describe the numbers for a checkpoint, those of each tensor-parallel rank in turn."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"ids": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state


@dataclass(frozen=True)
class LayerUnits:
    """The units of one kind in one layer, on this tensor-parallel rank.

    Attributes:
        owner: module of the layer that has both linear layers.
        first: the linear layer whose rows belong to units (column parallel).
        second: the linear layer whose columns do (row parallel).
        parts: stacked matrices in `first`; each has rows of every unit (two when gated).
        rows: rows that a unit has in each of them.
        columns: columns of a unit.
    """

    owner: Any
    first: Any
    second: Any
    parts: int
    rows: int
    columns: int

    name: ClassVar[str]

    @property
    def count(self) -> int:
        """Units that are left."""
        return int(self.second.weight.shape[1]) // self.columns

    def ids(self) -> torch.Tensor:
        """Numbers of the units that are left; int64 `[count]`."""
        kept = getattr(self.owner, KEPT, None)
        if kept is not None:
            return kept.ids.to(torch.int64)
        first_id = self.first.tp_group.rank() * self.count
        return torch.arange(first_id, first_id + self.count, device=self.second.weight.device)

    def scores(self) -> torch.Tensor:
        """How much each unit can contribute: norm of its rows times norm of its columns.

        Returns:
            float64 `[count]`, a new tensor.
        """
        into = _norms(self.first.weight.detach().view(self.parts, self.count, self.rows, -1), 1)
        out_of = _norms(self.second.weight.detach().view(-1, self.count, self.columns), 1)
        return into * out_of

    def keep(self, units: torch.Tensor) -> list[Replacement]:
        """Take all units out but these.

        Args:
            units: int64 `[m]`, ascending positions among those that are left.

        Returns:
            The parameters that became smaller.
        """
        count, tp_group = self.count, self.first.tp_group
        ids = self.ids()[units]
        rows = torch.cat(
            [part * count * self.rows + _spread(units, self.rows) for part in range(self.parts)]
        )
        columns = _spread(units, self.columns)
        replaced = [_cut(self.first, "weight", 0, rows), _cut(self.second, "weight", 1, columns)]
        if self.first.bias is not None:
            replaced.append(_cut(self.first, "bias", 0, rows))
        setattr(self.owner, KEPT, KeptUnits(ids, tp_group))
        self._resized(len(units))
        return replaced

    def resize(self, count: int) -> None:
        """Give a layer that was just built room for so many units, with undefined values."""
        if count == self.count:
            return
        device = self.second.weight.device
        rows, columns = self.parts * count * self.rows, count * self.columns
        for owner, name, shape in (
            (self.first, "weight", (rows, self.first.weight.shape[1])),
            (self.first, "bias", (rows,)),
            (self.second, "weight", (self.second.weight.shape[0], columns)),
        ):
            if (old := getattr(owner, name)) is not None:
                setattr(owner, name, like(old, old.new_empty(shape)))
        ids = torch.empty(count, dtype=torch.int32, device=device)
        setattr(self.owner, KEPT, KeptUnits(ids, self.first.tp_group))
        self._resized(count)

    def _resized(self, count: int) -> None:
        """Let Megatron's modules know how wide they are."""
        tp_size = self.first.tp_group.size()
        self.first.output_size_per_partition = self.parts * count * self.rows
        self.first.output_size = self.first.output_size_per_partition * tp_size
        self.second.input_size_per_partition = count * self.columns
        self.second.input_size = self.second.input_size_per_partition * tp_size


class Neurons(LayerUnits):
    """Neurons of a dense MLP: rows of fc1, both halves when gated, and columns of fc2."""

    name = "neuron"

    @classmethod
    def of(cls, layer: Any) -> Neurons:
        """The neurons of a TransformerLayer."""
        mlp = layer.mlp
        parts = 2 if mlp.config.gated_linear_unit else 1
        return cls(mlp, mlp.linear_fc1, mlp.linear_fc2, parts, rows=1, columns=1)


class QueryGroups(LayerUnits):
    """Query groups of self-attention, each with its keys and values; without GQA single heads."""

    name = "head"

    @classmethod
    def of(cls, layer: Any) -> QueryGroups:
        """The query groups of a TransformerLayer."""
        attention = layer.self_attention
        config = attention.config
        heads = config.num_attention_heads // config.num_query_groups
        width = attention.hidden_size_per_attention_head
        return cls(
            attention,
            attention.linear_qkv,
            attention.linear_proj,
            parts=1,
            rows=(heads + 2) * width,
            columns=heads * width,
        )

    def _resized(self, count: int) -> None:
        super()._resized(count)
        heads = self.columns // self.owner.hidden_size_per_attention_head
        for module in (self.owner, self.owner.core_attention):
            module.num_query_groups_per_partition = count
            module.num_attention_heads_per_partition = count * heads
        self.owner.core_attention.hidden_size_per_partition = count * self.columns


UNITS: Mapping[str, type[Neurons] | type[QueryGroups]] = {
    units.name: units for units in (Neurons, QueryGroups)
}


def _norms(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """2-norm over all dimensions but one, in float64."""
    others = [other for other in range(tensor.dim()) if other != dim]
    return torch.linalg.vector_norm(tensor, dim=others, dtype=torch.float64)


def _spread(units: torch.Tensor, width: int) -> torch.Tensor:
    """Positions of all lines of units that have `width` lines each; int64 `[m * width]`."""
    lines = torch.arange(width, device=units.device)
    return (units[:, None] * width + lines).flatten()


def _cut(module: Any, name: str, dim: int, lines: torch.Tensor) -> Replacement:
    """Keep some lines of a parameter."""
    replacement = Replacement.of(getattr(module, name), lambda t: t.index_select(dim, lines))
    setattr(module, name, replacement.new)
    return replacement

"""Structured pruning: whole neurons or query groups, chosen over all layers together.

Every layer is cut into blocks of units, at least one for each tensor-parallel rank, and every block
of a layer loses the same number, so that ranks stay even. The units of a block are put in order of
their scores; those at the same place in all blocks of a layer form a slice, and the slices of all
layers with the smallest scores go. A slice cannot go before those below it, so what is left of a
layer is known from its number alone.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.protocol import LayerFactors
from megatron_dynmo.dynamics.pruning.layer_sizes import MATRICES, LayerSizes
from megatron_dynmo.dynamics.pruning.layer_units import UNITS, LayerUnits
from megatron_dynmo.dynamics.pruning.method import listed
from megatron_dynmo.dynamics.pruning.replacement import Replacement
from megatron_dynmo.dynamics.pruning.threshold import Piece, smallest
from megatron_dynmo.errors import ConfigError

_UNIT_MATRICES = {
    "neuron": ("linear_fc1", "linear_fc2"),
    "head": ("linear_qkv", "linear_proj"),
}


@dataclass(frozen=True)
class _Grid:
    """How the units of a layer, as it was built, are cut.

    Attributes:
        blocks: blocks of a layer.
        slices: slices of a layer.
        width: units that a slice has in each block.
    """

    blocks: int
    slices: int
    width: int

    @classmethod
    def of(cls, config: DynMoConfig, args: Namespace) -> _Grid:
        sizes, tp_size = LayerSizes.of(args), args.tensor_model_parallel_size
        units = sizes.ffn if config.prune == "neuron" else sizes.groups
        blocks, width = config.prune_groups or tp_size, config.prune_multiple
        if blocks % tp_size:
            raise ConfigError(
                f"--dynmo-prune-groups {blocks} is no multiple of the tensor-parallel size "
                f"{tp_size}: every rank must hold whole blocks"
            )
        if units % (blocks * width):
            raise ConfigError(
                f"{units} {config.prune}s do not divide into {blocks} equal blocks of a multiple "
                f"of {width}: change --dynmo-prune-groups or --dynmo-prune-multiple"
            )
        return cls(blocks, units // (blocks * width), width)

    @property
    def slice_units(self) -> int:
        """Units of a slice over all blocks."""
        return self.blocks * self.width


class UnitPruning:
    """Takes whole units out; see the module.

    Raises:
        ConfigError: The units do not divide as asked, or too few would be left.
    """

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        assert config.prune is not None
        self._sizes = LayerSizes.of(args)
        self._kind = UNITS[config.prune]
        self._grid = _Grid.of(config, args)
        self._tp_size = args.tensor_model_parallel_size
        self.num_layers = args.num_layers
        self._slices = [self._grid.slices] * self.num_layers  # left, by layer
        removable = self.num_layers * (self._grid.slices - 1)
        if self._wanted(Fraction(repr(config.prune_final))) > removable:
            most = removable / (self.num_layers * self._grid.slices)
            raise ConfigError(
                f"--dynmo-prune-final {config.prune_final:g} leaves less than one "
                f"{config.prune} in each of {self._grid.blocks} blocks of a layer; at most "
                f"{most:.3g} is possible"
            )

    def _wanted(self, share: Fraction) -> int:
        return math.floor(share * self.num_layers * self._grid.slices)

    def begin(self, run: Any) -> None:
        """See `PruningMethod.begin`; smaller matrices need no other kernels."""

    def weights_changed(self) -> None:
        """Nothing is derived from weights here."""

    def due(self, share: Fraction) -> int:
        """Slices to go; see `PruningMethod.due`."""
        gone = self.num_layers * self._grid.slices - sum(self._slices)
        return max(self._wanted(share) - gone, 0)

    def prune(self, run: Any, amount: int) -> list[Replacement]:
        """See `PruningMethod.prune`."""
        layers = {n: self._kind.of(layer) for n, layer in sorted(run.stage.layers().items())}
        orders: dict[int, torch.Tensor] = {}
        pieces: dict[int, Piece] = {}
        for number, units in layers.items():
            orders[number], scores = self._order(units)
            pieces[number] = self._piece(number, scores, units.first.tp_group)
        bound = smallest(
            list(pieces.values()),
            amount,
            num_indices=self.num_layers * self._grid.slices,
            dtype=torch.float32,
            device=run.topology.device,
            group=run.topology.pp_group,
        )
        lost = torch.zeros(self.num_layers, dtype=torch.int64, device=run.topology.device)
        for number, piece in pieces.items():
            lost[number - 1] = bound.selected(piece).sum()
        dist.all_reduce(lost, group=run.topology.pp_group)
        replaced = []
        for number, units in layers.items():
            if gone := int(lost[number - 1]) * self._grid.width:
                kept = orders[number][:, gone:]
                replaced += units.keep(kept.flatten().sort().values)
        self._slices = [left - gone for left, gone in zip(self._slices, lost.tolist(), strict=True)]
        return replaced

    def _order(self, units: LayerUnits) -> tuple[torch.Tensor, torch.Tensor]:
        """Put this rank's units in order, block by block.

        Returns:
            Their positions by ascending score, int64, and the scores so ordered, rounded to
            float32 so that no last bit of a norm decides; both `[blocks here, n]`.
        """
        scores = units.scores().to(torch.float32).view(self._grid.blocks // self._tp_size, -1)
        ordered, places = scores.sort(dim=1, stable=True)
        first = torch.arange(len(scores), device=scores.device)[:, None] * scores.shape[1]
        return first + places, ordered

    def _piece(self, number: int, scores: torch.Tensor, tp_group: dist.ProcessGroup) -> Piece:
        """The slices of a layer that may go.

        Args:
            number: of the layer.
            scores: of this rank's units, as `_order` returns them.
            tp_group: ranks that hold the layer's other blocks.

        Collective:
            The tensor-parallel group.
        """
        parts = [torch.empty_like(scores) for _ in range(self._tp_size)]
        dist.all_gather(parts, scores.contiguous(), group=tp_group)
        by_place = torch.cat(parts).to(torch.float64).sum(0)
        slices = by_place.view(-1, self._grid.width).sum(1).to(torch.float32)
        first = (number - 1) * self._grid.slices
        return Piece(slices[:-1], lambda at: at + first)  # the last slice of a layer stays

    def shape(self, layer: Any) -> None:
        """See `Dynamic.shape`."""
        if sum(self._slices) < self.num_layers * self._grid.slices:
            left = self._slices[layer.layer_number - 1] * self._grid.slice_units
            self._kind.of(layer).resize(left // self._tp_size)

    def factors(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.factors`."""
        left = 1 - self.sparsity(layer_number)
        shares = {
            name: left if name in _UNIT_MATRICES[self._kind.name] else 1.0 for name in MATRICES
        }
        core = left if self._kind.name == "head" else 1.0
        factor = self._sizes.time_factor(shares, core)
        return LayerFactors(factor, factor)

    def work(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.work`."""
        return self.factors(layer_number)

    def sparsity(self, layer_number: int) -> float:
        """See `PruningMethod.sparsity`."""
        return 1 - self._slices[layer_number - 1] / self._grid.slices

    def details(self) -> Mapping[str, Any]:
        """Units left, by layer."""
        return {"left": [left * self._grid.slice_units for left in self._slices]}

    def state(self) -> dict[str, Any]:
        """See `PruningMethod.state`."""
        return {"blocks": self._grid.blocks, "width": self._grid.width, "slices": self._slices}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `PruningMethod.restore`."""
        if (state["blocks"], state["width"]) != (self._grid.blocks, self._grid.width):
            raise ConfigError(
                f"the checkpoint was pruned in {state['blocks']} blocks and multiples of "
                f"{state['width']}, this run has {self._grid.blocks} and {self._grid.width}: give "
                f"--dynmo-prune-groups {state['blocks']} --dynmo-prune-multiple {state['width']}"
            )
        self._slices = listed(state["slices"], int, self.num_layers, "the list of slices left")

"""Unstructured pruning: the smallest weights of all MLP and attention matrices of the model."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.protocol import LayerFactors
from megatron_dynmo.dynamics.pruning import two_of_four
from megatron_dynmo.dynamics.pruning.compact_weight import (
    Age,
    is_compact,
    make_compact,
    remove_weights,
)
from megatron_dynmo.dynamics.pruning.kernels import Kernels
from megatron_dynmo.dynamics.pruning.layer_sizes import MATRICES, LayerSizes
from megatron_dynmo.dynamics.pruning.replacement import Replacement
from megatron_dynmo.dynamics.pruning.sparse_linear import Products
from megatron_dynmo.dynamics.pruning.threshold import Piece, smallest
from megatron_dynmo.errors import ConfigError

_Place = tuple[int, int]  # layer from 0 and number of the matrix

_COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")


class MagnitudePruning:
    """Takes single weights out, by one threshold for the whole model.

    State: how many weights are left in each matrix on each tensor-parallel rank, and what was
    measured of the kernels.

    Raises:
        ConfigError: Rows are no whole groups of four, which the pattern 2:4 needs.
    """

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        self._sizes = LayerSizes.of(args)
        self._tp_size = args.tensor_model_parallel_size
        tokens = args.seq_length * args.micro_batch_size
        self.num_layers = args.num_layers
        whole = [
            [self._sizes.num_weights(name) // self._tp_size] * self._tp_size for name in MATRICES
        ]
        self._left = torch.tensor([whole] * self.num_layers)  # [layers, matrices, tp]
        # What stays of a matrix at least: a tenth of what stays of all on average.
        share = (1 - Fraction(repr(config.prune_final))) / 10
        self._fewest = torch.tensor(
            [math.ceil(share * self._sizes.num_weights(name)) for name in MATRICES]
        )
        self._pattern = config.prune_pattern
        shapes = [self._local_shape(name) for name in MATRICES]
        self._kernels = Kernels(self._pattern, config.prune_compute, shapes, tokens)
        self._age = Age()

    @property
    def _total(self) -> int:
        return self.num_layers * self._sizes.layer_weights

    @property
    def _has_pruned(self) -> bool:
        return int(self._left.sum()) < self._total

    def weights_changed(self) -> None:
        """See `PruningMethod.weights_changed`."""
        self._age.count += 1

    def begin(self, run: Any) -> None:
        """See `PruningMethod.begin`."""
        self._kernels.begin(
            run.stage.config.params_dtype, run.topology.device, has_pruned=self._has_pruned
        )
        if self._has_pruned:
            for number, layer in run.stage.layers().items():
                for at, linear in enumerate(_linears(layer)):
                    self._set_products(number - 1, at, linear)

    def _set_products(self, layer: int, at: int, linear: Any) -> None:
        linear.dynmo_products = self._kernels.of(at).products(self._density(layer, at))

    def due(self, share: Fraction) -> int:
        """Weights to go; see `PruningMethod.due`."""
        return max(math.floor(share * self._total) - (self._total - int(self._left.sum())), 0)

    def prune(self, run: Any, amount: int) -> list[Replacement]:
        """See `PruningMethod.prune`."""
        device, dtype = run.topology.device, run.stage.config.params_dtype
        self._kernels.calibrate(dtype, device)
        held = {
            (number - 1, at): linear
            for number, layer in sorted(run.stage.layers().items())
            for at, linear in enumerate(_linears(layer))
        }
        pieces = {place: self._piece(*place, linear) for place, linear in held.items()}
        if self._pattern == "2:4":
            removed = self._select_of_groups(held, pieces, amount, dtype, device)
        else:
            removed = self._select(pieces, amount, dtype, device)
        left = self._left - self._count(removed, device)
        self._require_something_left(left)
        self._left = left
        replaced = []
        for place, selected in removed.items():
            # Also where nothing goes now: all matrices have one form from here on.
            if selected.any() or not is_compact(held[place]):
                replaced.append(remove_weights(held[place], selected, self._age))
            self._set_products(*place, held[place])
        return replaced

    def _select(
        self, pieces: Mapping[_Place, Piece], amount: int, dtype: torch.dtype, device: torch.device
    ) -> dict[_Place, torch.Tensor]:
        """Choose the smallest weights of the model, but leave something of every matrix.

        Megatron begins the matrices that write into the residual stream with smaller numbers, so
        that they would be emptied first. A matrix that would lose more than it may loses just
        that, its own smallest weights, and the rest is chosen among the others.

        Returns:
            For each matrix here, which of its present weights go.

        Collective:
            The model-parallel group, then the tensor-parallel group of a stage that has such
            matrices.
        """
        # Tensor- and pipeline-parallel ranks hold each weight once; data-parallel replicas, equal
        # bit by bit, find the same.
        find = partial(smallest, num_indices=self._total, dtype=dtype, device=device)
        # A run that was resumed with a lower final share may have less of a matrix already.
        most = (self._left.sum(-1) - self._fewest).clamp(min=0)
        emptied: dict[_Place, int] = {}
        while True:
            others = {place: piece for place, piece in pieces.items() if place not in emptied}
            rest = amount - sum(emptied.values())
            bound = find(list(others.values()), rest, group=mpu.get_model_parallel_group())
            removed = {place: bound.selected(piece) for place, piece in others.items()}
            over = (self._count(removed, device).sum(-1) > most).nonzero().tolist()
            if not over:
                break
            emptied |= {(layer, at): int(most[layer, at]) for layer, at in over}
        for place, piece in pieces.items():
            if place in emptied:
                own = find([piece], emptied[place], group=mpu.get_tensor_model_parallel_group())
                removed[place] = own.selected(piece)
        return removed

    def _select_of_groups(
        self,
        held: Mapping[_Place, Any],
        pieces: Mapping[_Place, Piece],
        amount: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[_Place, torch.Tensor]:
        """Choose the smallest of those weights whose group of four keeps two larger ones.

        Args:
            held: the linear layers here.
            pieces: their weights.
            amount: as the others, of `prune`.
            dtype: see there.
            device: see there.

        Collective:
            As `_select`.
        """
        free = {
            place: two_of_four.may_go(piece.values, _places(held[place]))
            for place, piece in pieces.items()
        }
        chosen = self._select(
            {place: piece.part(free[place]) for place, piece in pieces.items()},
            amount,
            dtype,
            device,
        )
        removed = {}
        for place, piece in pieces.items():
            removed[place] = torch.zeros_like(piece.values, dtype=torch.bool)
            removed[place][free[place]] = chosen[place]
        return removed

    def _count(self, removed: Mapping[_Place, torch.Tensor], device: torch.device) -> torch.Tensor:
        """How many weights go, of each matrix on each tensor-parallel rank; as `_left`.

        Collective:
            The model-parallel group.
        """
        lost = torch.zeros_like(self._left, device=device)
        for (layer, at), selected in removed.items():
            lost[layer, at, mpu.get_tensor_model_parallel_rank()] = selected.sum()
        dist.all_reduce(lost, group=mpu.get_model_parallel_group())
        return lost.cpu()

    def _local_shape(self, name: str) -> tuple[int, int]:
        rows, columns = self._sizes.shape(name)
        if name in _COLUMN_PARALLEL:
            return rows // self._tp_size, columns
        return rows, columns // self._tp_size

    def _piece(self, layer: int, at: int, linear: Any) -> Piece:
        """The weights of a matrix that are left, with their numbers in the whole model."""
        before = self._sizes.layer_weights * layer
        before += sum(self._sizes.num_weights(name) for name in MATRICES[:at])
        name, tp_rank = MATRICES[at], linear.tp_group.rank()
        rows, columns = self._local_shape(name)
        parts = 2 if name == "linear_fc1" and self._sizes.gated else 1
        height = rows // parts  # rows of one part on one rank

        def index(positions: torch.Tensor) -> torch.Tensor:
            flat = linear.weight_index[positions] if is_compact(linear) else positions
            row, column = flat.to(torch.int64) // columns, flat.to(torch.int64) % columns
            if name in _COLUMN_PARALLEL:
                part, within = row // height, row % height
                row = (part * self._tp_size + tp_rank) * height + within
                return before + row * columns + column
            return before + row * columns * self._tp_size + tp_rank * columns + column

        return Piece(linear.weight.detach().view(-1), index)

    def _require_something_left(self, left: torch.Tensor) -> None:
        empty = (left == 0).nonzero().tolist()
        if empty:
            layer, at, _ = empty[0]
            raise ConfigError(
                f"pruning would leave nothing of {MATRICES[at]} of layer {layer + 1}: lower "
                "--dynmo-prune-final"
            )

    def shape(self, layer: Any) -> None:
        """See `Dynamic.shape`."""
        if not self._has_pruned:
            return
        number = layer.layer_number - 1
        for at, linear in enumerate(_linears(layer)):
            make_compact(linear, int(self._left[number, at, linear.tp_group.rank()]), self._age)
            self._set_products(number, at, linear)

    def _density(self, layer: int, at: int) -> float:
        """Share of a matrix that is left, over all tensor-parallel ranks."""
        return int(self._left[layer, at].sum()) / self._sizes.num_weights(MATRICES[at])

    def factors(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.factors`; a product that stays dense takes as long as before."""
        return self._of_layer(self._kernels.times, layer_number)

    def work(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.work`."""
        return self._of_layer(self._kernels.work, layer_number)

    def _of_layer(
        self, of_matrix: Callable[[int, float], tuple[float, float, float]], layer_number: int
    ) -> LayerFactors:
        times = [
            of_matrix(at, self._density(layer_number - 1, at))
            if self._has_pruned
            else (1.0, 1.0, 1.0)
            for at in range(len(MATRICES))
        ]
        forward = dict(zip(MATRICES, (one[0] for one in times), strict=True))
        backward = dict(zip(MATRICES, ((one[1] + one[2]) / 2 for one in times), strict=True))
        return LayerFactors(self._sizes.time_factor(forward), self._sizes.time_factor(backward))

    def sparsity(self, layer_number: int) -> float:
        """See `PruningMethod.sparsity`."""
        return 1 - int(self._left[layer_number - 1].sum()) / self._sizes.layer_weights

    def details(self) -> Mapping[str, Any]:
        """Weights left, and how many of each product of the model run sparse."""
        products = [
            self._kernels.of(at).products(self._density(layer, at))
            for layer in range(self.num_layers)
            for at in range(len(MATRICES))
        ]
        return {
            "left": int(self._left.sum()),
            "sparse_products": {
                name: sum(getattr(one, name) for one in products) for name in Products._fields
            },
        }

    def state(self) -> dict[str, Any]:
        """See `PruningMethod.state`."""
        return {
            "tp_size": self._tp_size,
            "pattern": self._pattern,
            "left": self._left.tolist(),
            "measured": self._kernels.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `PruningMethod.restore`."""
        if state["tp_size"] != self._tp_size:
            raise ConfigError(
                f"the checkpoint holds the non-zeros of {state['tp_size']} tensor-parallel ranks, "
                f"each as a vector; this run has {self._tp_size}: resume with "
                f"--tensor-model-parallel-size {state['tp_size']}"
            )
        # Checkpoints from before there was a choice have none.
        if (pattern := state.get("pattern", "any")) != self._pattern:
            raise ConfigError(
                f"the checkpoint was pruned with --dynmo-prune-pattern {pattern}: go on with it"
            )
        left = torch.tensor(state["left"])
        if left.shape != self._left.shape or left.dtype != torch.int64:
            raise ValueError(f"counts of shape {list(left.shape)}, not {list(self._left.shape)}")
        self._left = left
        self._kernels.restore(state["measured"])


def _linears(layer: Any) -> Iterator[Any]:
    """The matrices of a layer, in the order of `MATRICES`."""
    attention, mlp = layer.self_attention, layer.mlp
    yield from (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)


def _places(linear: Any) -> torch.Tensor:
    """Positions of the present weights in the flattened matrix, ascending."""
    if is_compact(linear):
        places: torch.Tensor = linear.weight_index
        return places
    return torch.arange(linear.weight.numel(), device=linear.weight.device)

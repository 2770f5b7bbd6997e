"""On which kernels the products of pruned matrices run: fixed by a flag, or measured once in a run.

Tier: torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_dynmo.dynamics.pruning import product_calibration, two_of_four
from megatron_dynmo.dynamics.pruning.layer_sizes import MATRICES
from megatron_dynmo.dynamics.pruning.product_calibration import Crossover, crossover
from megatron_dynmo.dynamics.pruning.sparse_linear import Products
from megatron_dynmo.dynamics.pruning.two_of_four import CompressedForward
from megatron_dynmo.errors import ConfigError

_SPARSE = Crossover(1.0, 1.0, 1.0)
_FIXED: dict[str, dict[str, Crossover | CompressedForward]] = {
    "any": {"dense": Crossover(), "sparse": _SPARSE},
    "2:4": {"dense": CompressedForward(), "sparse": two_of_four.ALWAYS},
}


class Kernels:
    """Kernels of the four matrices of a layer; the same on every rank, layout and resume.

    Args:
        pattern: `any` or `2:4`.
        compute: `auto`, `dense` or `sparse`.
        shapes: rows and columns of each matrix on one tensor-parallel rank, as in `MATRICES`.
        num_tokens: of a micro-batch.

    Raises:
        ConfigError: Rows are no whole groups of four, which 2:4 needs.
    """

    def __init__(
        self, pattern: str, compute: str, shapes: Sequence[tuple[int, int]], num_tokens: int
    ) -> None:
        self._is_2_4 = pattern == "2:4"
        self._shapes, self._num_tokens = shapes, num_tokens
        self._fixed = _FIXED[pattern].get(compute)
        self._measured: list[Crossover | CompressedForward] | None = None
        for name, (_, columns) in zip(MATRICES, shapes, strict=True):
            if self._is_2_4 and columns % two_of_four.GROUP:
                raise ConfigError(
                    f"{name} has rows of {columns} weights on each tensor-parallel rank, which are "
                    f"no whole groups of {two_of_four.GROUP}: use --dynmo-prune-pattern any"
                )

    def of(self, at: int) -> Crossover | CompressedForward:
        """What is known of a matrix, by its number in `MATRICES`."""
        if self._fixed is not None:
            return self._fixed
        return self._type() if self._measured is None else self._measured[at]

    def times(self, at: int, density: float) -> tuple[float, float, float]:
        """Expected time of each product of a matrix over that of the dense one.

        Where a flag decides, nobody has measured any, so none is promised.
        """
        return (1.0, 1.0, 1.0) if self._fixed is not None else self.of(at).times(density)

    def work(self, at: int, density: float) -> tuple[float, float, float]:
        """Multiplications of each product over those of the dense one."""
        products = self.of(at).products(density)
        is_less = (
            products.forward or products.compressed,
            products.input_grad,
            products.weight_grad,
        )
        forward, input_grad, weight_grad = (density if less else 1.0 for less in is_less)
        return forward, input_grad, weight_grad

    def begin(self, dtype: torch.dtype, device: torch.device, *, has_pruned: bool) -> None:
        """Refuse what cannot run here; measure for what was pruned without a measurement.

        Args:
            dtype: of the weights.
            device: where they are.
            has_pruned: whether weights are gone already, as in a resumed run.

        Raises:
            ConfigError: torch has no kernels of what the flags or the checkpoint ask for.

        Collective:
            All ranks of the world.
        """
        self._require(dtype, device)
        if has_pruned:
            self.calibrate(dtype, device)

    def calibrate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Measure on rank 0, unless that was done or is not asked for.

        Args:
            dtype: of the weights.
            device: where they are.

        Collective:
            All ranks of the world.
        """
        if self._fixed is not None or self._measured is not None:
            return
        width = len(self._type._fields)
        found = torch.zeros(len(self._shapes), width, dtype=torch.float64, device=device)
        if dist.get_rank() == 0:
            for at, shape in enumerate(self._shapes):
                limits = self._measure(*shape, dtype, device)
                found[at] = torch.tensor(limits, dtype=torch.float64)
        dist.broadcast(found, 0)
        self._measured = [self._type(*row) for row in found.tolist()]

    def _measure(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> Crossover | CompressedForward:
        size = rows, columns, self._num_tokens
        if self._is_2_4:
            return two_of_four.measure(*size, get_num_microbatches(), dtype, device)
        return crossover(*size, dtype, device)

    @property
    def _type(self) -> type[Crossover | CompressedForward]:
        return CompressedForward if self._is_2_4 else Crossover

    def _require(self, dtype: torch.dtype, device: torch.device) -> None:
        for at, shape in enumerate(self._shapes):
            wanted = self.of(at).products(0.0)
            if self._is_there(wanted, shape, dtype, device):
                continue
            kind = "2:4" if self._is_2_4 else "sparse"
            source = "the checkpoint runs" if self._fixed is None else "you ask for"
            remedy = "dense" if self._fixed is None else "auto or dense"
            raise ConfigError(
                f"{source} {kind} products, of which torch has none for {dtype} on {device.type} "
                f"and matrices as {MATRICES[at]}; use --dynmo-prune-compute {remedy}"
            )

    @staticmethod
    def _is_there(
        wanted: Products, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> bool:
        if wanted.compressed:
            return two_of_four.is_supported(*shape, dtype, device)
        return product_calibration.is_supported(dtype, device, wanted)

    def state(self) -> dict[str, list[float]] | None:
        """What was measured, as JSON can hold it."""
        if self._measured is None:
            return None
        return {name: list(one) for name, one in zip(MATRICES, self._measured, strict=True)}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Take up what `state` returned."""
        if state is not None:
            self._measured = [self._type(*state[name]) for name in MATRICES]

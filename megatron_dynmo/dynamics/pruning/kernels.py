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

    def calibrate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Measure on rank 0, unless that was done or is not asked for.

        Args:
            dtype: of the weights.
            device: where they are.

        Raises:
            ConfigError: Sparse kernels are demanded, and torch has none here.

        Collective:
            All ranks of the world.
        """
        self._require(dtype, device)
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
        if self._fixed == _SPARSE:
            is_there, kind = product_calibration.is_supported(dtype, device), "sparse"
        elif self._fixed == two_of_four.ALWAYS:
            is_there = all(two_of_four.is_supported(*s, dtype, device) for s in self._shapes)
            kind = "2:4"
        else:
            return
        if not is_there:
            raise ConfigError(
                f"torch has no {kind} products of {dtype} on {device.type} for these matrices; use "
                "--dynmo-prune-compute auto or dense"
            )

    def state(self) -> dict[str, list[float]] | None:
        """What was measured, as JSON can hold it."""
        if self._measured is None:
            return None
        return {name: list(one) for name, one in zip(MATRICES, self._measured, strict=True)}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Take up what `state` returned."""
        if state is not None:
            self._measured = [self._type(*state[name]) for name in MATRICES]

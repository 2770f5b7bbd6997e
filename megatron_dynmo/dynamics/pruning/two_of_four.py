"""2:4 sparsity: of four weights in a row two stay, as sparse tensor cores want it.

Tier: torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from megatron_dynmo.dynamics.pruning.product_calibration import (
    FASTER,
    MAX_TOKENS,
    REFUSED_BY_TORCH,
    time_ratio,
)
from megatron_dynmo.dynamics.pruning.sparse_linear import Products, compress
from megatron_dynmo.dynamics.pruning.threshold import magnitude_bits

GROUP, KEPT = 4, 2
DENSITY = KEPT / GROUP


class CompressedForward(NamedTuple):
    """Time of the forward product on sparse tensor cores over that of the dense one.

    The other products stay dense: the gradient of the input takes the columns of the matrix, of
    whose weights other numbers are left, and that of the weight is not sparse.
    """

    ratio: float = 1.0

    def products(self, density: float) -> Products:
        """How a matrix of some density is computed: compressed once all its groups have lost."""
        return Products(compressed=self.ratio < 1 and density <= DENSITY)

    def times(self, density: float) -> tuple[float, float, float]:
        """See `Crossover.times`."""
        return (self.ratio if self.products(density).compressed else 1.0, 1.0, 1.0)


ALWAYS = CompressedForward(0.5)


def may_go(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Find the weights that are not among the two largest of their group.

    Of equal magnitudes the later one counts as larger, as in `threshold`.

    Args:
        values: `[n]`, the weights that are left.
        places: int `[n]`, ascending positions in the flattened matrix; groups begin at multiples
            of four and end in the same row.

    Returns:
        int64 `[m]`, ascending positions in `values`.
    """
    if not len(values):
        return torch.empty(0, dtype=torch.int64, device=values.device)
    groups, group = (places.to(torch.int64) // GROUP).unique_consecutive(return_inverse=True)
    slots = group * GROUP + places.to(torch.int64) % GROUP
    bits = torch.full((len(groups) * GROUP,), -1, dtype=torch.int64, device=values.device)
    bits[slots] = magnitude_bits(values).to(torch.int64)
    # Those that are gone sort in front, so the first two are gone already or may go.
    first = bits.view(-1, GROUP).sort(dim=1, stable=True).indices[:, : GROUP - KEPT]
    is_first = torch.zeros(len(groups), GROUP, dtype=torch.bool, device=values.device)
    is_first.scatter_(1, first, True)
    return is_first.view(-1)[slots].nonzero().flatten()


def measure(
    rows: int, columns: int, num_tokens: int, passes: int, dtype: torch.dtype, device: torch.device
) -> CompressedForward:
    """Time the forward products of an iteration, dense and compressed; compressing counts.

    Args:
        rows: outputs on one tensor-parallel rank.
        columns: inputs there.
        num_tokens: tokens of a micro-batch; longer ones are measured in parts.
        passes: micro-batches of an iteration, which share one compressed matrix.
        dtype: of the weights.
        device: where to measure.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(min(num_tokens, MAX_TOKENS), columns, generator=generator)
    passes *= math.ceil(num_tokens / MAX_TOKENS)
    weight = torch.randn(rows, columns, generator=generator)
    weight.view(-1, GROUP)[:, KEPT:] = 0
    x, weight = (tensor.to(device=device, dtype=dtype) for tensor in (x, weight))

    def run(is_sparse: bool) -> torch.Tensor:
        matrix = compress(weight) if is_sparse else weight
        for _ in range(passes):
            y = x @ matrix.t()
        return y

    ratio = time_ratio(run, device)
    return CompressedForward(ratio if ratio < FASTER else 1.0)


def is_supported(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has the compressed product of such a matrix."""
    weight = torch.ones(rows, columns, dtype=dtype, device=device)
    weight.view(-1, GROUP)[:, KEPT:] = 0
    try:
        torch.ones(rows, columns, dtype=dtype, device=device) @ compress(weight).t()
    except REFUSED_BY_TORCH:
        return False
    return True

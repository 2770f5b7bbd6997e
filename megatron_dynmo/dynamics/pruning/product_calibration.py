"""How sparse a matrix must be before its products are faster on sparse kernels.

Tier: torch. Found by trying: kernels, hardware and sizes decide it, no formula does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_dynmo.dynamics.pruning.sparse_linear import (
    Pattern,
    Products,
    forward_product,
    input_gradient,
    transposed_layout,
    weight_gradient,
)

# A little above round shares, which are what people prune to.
DENSITIES = (0.011, 0.022, 0.055, 0.11, 0.22, 0.35)
MAX_TOKENS = 1024
_REPEATS = 5
# A gain smaller than the noise of the measurement is none.
FASTER = 0.95
# By kernels that it does not have for a device, a dtype or a size.
REFUSED_BY_TORCH = (RuntimeError, NotImplementedError)

_Run = Callable[[bool], torch.Tensor]


class Crossover(NamedTuple):
    """For each product the highest density at which it is faster sparse; 0 where it never is."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    def products(self, density: float) -> Products:
        """Which products of a matrix of some density run sparse."""
        return Products(*(density <= limit for limit in self))

    def times(self, density: float) -> tuple[float, float, float]:
        """Expected time of each product over that of the dense one, in the order of the fields."""
        forward, input_grad, weight_grad = (
            density / limit if density <= limit else 1.0 for limit in self
        )
        return forward, input_grad, weight_grad


def is_supported(dtype: torch.dtype, device: torch.device, products: Products) -> bool:
    """Whether torch has the sparse kernels of some products; of none it has."""
    pattern = Pattern(torch.arange(4, dtype=torch.int32, device=device), 2, 2)
    try:
        runs = _runs(pattern, torch.ones(4, dtype=dtype, device=device), 2)
        for run, is_wanted in zip(runs, products[: len(runs)], strict=True):
            if is_wanted:
                run(True)
    except REFUSED_BY_TORCH:
        return False
    return True


def crossover(
    rows: int, columns: int, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> Crossover:
    """Measure a matrix size: dense and sparse by turns, from almost empty to denser.

    Draws from no random stream that training uses.

    Args:
        rows: outputs on one tensor-parallel rank.
        columns: inputs there.
        num_tokens: tokens of a micro-batch; longer ones are measured on a part.
        dtype: of the weights.
        device: where to measure.
    """
    tokens = min(num_tokens, MAX_TOKENS)
    generator = torch.Generator().manual_seed(1)
    best, candidates = [0.0] * 3, {0, 1, 2}
    places = torch.rand(rows * columns, generator=generator)
    for density in DENSITIES:
        index = (places < density).nonzero().flatten().to(torch.int32).to(device)
        pattern = Pattern(index, rows, columns)
        values = torch.ones(len(index), dtype=dtype, device=device)
        runs = _runs(pattern, values, tokens)
        for product in sorted(candidates):
            if not time_ratio(runs[product], device) < FASTER:
                candidates.discard(product)
            else:
                best[product] = density
    return Crossover(*best)


def _runs(pattern: Pattern, values: torch.Tensor, tokens: int) -> list[_Run]:
    """The three products, each to be run sparse (True) or dense."""
    rows, columns = pattern.shape
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, columns, generator=generator).to(values)
    dy = torch.randn(tokens, rows, generator=generator).to(values)
    dense = pattern.dense(values)

    def own(is_sparse: bool) -> torch.Tensor:
        return transposed_layout(dy) if is_sparse else dy

    return [
        lambda is_sparse: forward_product(x, values, pattern, None if is_sparse else dense),
        lambda is_sparse: input_gradient(
            own(is_sparse), values, pattern, None if is_sparse else dense
        ),
        lambda is_sparse: weight_gradient(own(is_sparse), x, values, pattern, is_sparse),
    ]


def time_ratio(run: _Run, device: torch.device) -> float:
    """Time of the sparse way over that of the dense one, by the least of a few times each.

    Infinite where there is none, and where it rounds otherwise from one time to the next: a run
    could not be repeated then, nor compared with the same run under another layout.

    Args:
        run: takes whether to run sparse.
        device: where it runs.
    """
    try:
        first = run(True)  # works out the pattern, which training does once
    except REFUSED_BY_TORCH:
        return math.inf
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_REPEATS):
        for is_sparse in (False, True):
            seconds, result = _timed(run, is_sparse, device)
            times[is_sparse].append(seconds)
            if is_sparse and not torch.equal(result, first):
                return math.inf
    return min(times[True]) / min(times[False])


def _timed(run: _Run, is_sparse: bool, device: torch.device) -> tuple[float, torch.Tensor]:
    started = time.perf_counter()
    result = run(is_sparse)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result

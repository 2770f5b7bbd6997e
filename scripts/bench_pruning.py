"""What pruning saves in one layer on one core: FFN without 90 % of its neurons, CSR against dense.

Dense and pruned run by turns, and each ratio is the median over pairs, so that other load on the
machine falls on both.

    make bench-pruning
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_dynmo.dynamics.pruning.product_calibration import Crossover, crossover
from megatron_dynmo.dynamics.pruning.sparse_linear import Pattern, Products, sparse_linear
from scripts.results import write_results

WAYS = {
    "all products sparse": Products(True, True, True),
    "sparse where calibrated": None,
    "all products dense": Products(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.8, 0.9, 0.95, 0.98])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rows = [ffn(arguments)]
    limits = crossover(
        4 * arguments.hidden, arguments.hidden, arguments.tokens, torch.float32, torch.device("cpu")
    )
    print(f"calibration of {4 * arguments.hidden} x {arguments.hidden}: {limits}")
    for sparsity in arguments.sparsities:
        rows += csr(arguments, sparsity, limits)
    write_results("pruning", "real", "make bench-pruning", rows)


def ffn(arguments: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of a GELU MLP, whole and with a tenth of its neurons."""
    hidden = arguments.hidden
    x = torch.randn(arguments.tokens, hidden, requires_grad=True)

    def block(neurons: int) -> Callable[[], None]:
        fc1 = torch.nn.Linear(hidden, neurons)
        fc2 = torch.nn.Linear(neurons, hidden)
        return lambda: fc2(torch.nn.functional.gelu(fc1(x))).sum().backward()

    whole, left = block(4 * hidden), block(4 * hidden // 10)
    return report("FFN without 90 % of its neurons", whole, left, arguments.pairs)


def csr(arguments: argparse.Namespace, sparsity: float, limits: Crossover) -> list[dict[str, Any]]:
    """Forward and backward of one matrix, dense and as its non-zeros."""
    rows, columns = 4 * arguments.hidden, arguments.hidden
    x = torch.randn(arguments.tokens, columns, requires_grad=True)
    dy = torch.randn(arguments.tokens, rows)
    weight = torch.randn(rows, columns, requires_grad=True)
    index = (torch.rand(rows * columns) > sparsity).nonzero().flatten().to(torch.int32)
    values = weight.detach().view(-1)[index].clone().requires_grad_()
    pattern = Pattern(index, rows, columns)
    dense = pattern.dense(values.detach())
    found = []
    for name, ways in WAYS.items():
        products = ways or limits.products(1 - sparsity)
        row = report(
            f"{sparsity:.0%} of {rows} x {columns} gone, {name}",
            lambda: (x @ weight.t()).backward(dy),
            lambda p=products: sparse_linear(x, values, pattern, p, dense).backward(dy),
            arguments.pairs,
        )
        found.append({**row, "sparse_products": str(products)})
    return found


def report(
    name: str, dense: Callable[[], None], pruned: Callable[[], None], pairs: int
) -> dict[str, Any]:
    """Print and return the medians of both and of their ratio, pair by pair."""
    pruned()
    times = [(milliseconds(dense), milliseconds(pruned)) for _ in range(pairs)]
    before, after = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(one / other for one, other in times)
    print(f"{name}: {before:.1f} -> {after:.1f} ms, {ratio:.2f}x")
    return {"cell": name, "dense_ms": before, "pruned_ms": after, "speedup": ratio}


def milliseconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    main()

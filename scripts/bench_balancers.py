"""How good balancers are and how long they take, side by side.

Each balancer splits the same layers over the same stages; layer times come in six shapes. Its
ratio is the time of its slowest stage over the smallest that any split can have. With two virtual
stages a rank, whose optimum is not known, it is over a lower bound that the search proves, so the
true ratio is smaller or equal. Baselines: DeepSpeed's published algorithm, the diffusion that the
paper describes (both with the extras counted to the outer layers), and the same number of layers
on every stage.

    make bench-balancers
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_dynmo.balancers import (
    VirtualPartition,
    diffusion,
    partition,
    partition_virtual,
)
from megatron_dynmo.balancers.resource import to_integers
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.simulate.baselines import deepspeed_split, paper_diffusion
from megatron_dynmo.simulate.catalogue import make_scenario
from megatron_dynmo.simulate.model import TransformerModel
from scripts.results import write_results

SIZES = ((8, 2), (32, 4), (32, 8), (64, 16), (128, 16), (128, 64), (1_000, 100), (10_000, 1_000))
QUICK_SIZES = ((8, 2), (32, 8), (128, 64))
VIRTUAL_STAGES = 2
BEST_OF, LONG_S = 7, 2.0  # repeated until that many or so many seconds

console = Console()


@dataclass(frozen=True)
class Chain:
    """What is to be split: layer times, and what the outer stages have besides, in ms."""

    case: str
    num_stages: int
    costs: list[float]
    first: float = 0.0
    last: float = 0.0

    @property
    def weights(self) -> list[float]:
        """Layer times with the extras counted to the outer layers."""
        return [self.costs[0] + self.first, *self.costs[1:-1], self.costs[-1] + self.last]

    @property
    def even(self) -> list[int]:
        """Megatron's default split, or the nearest to it."""
        return LayerLayout.nearly_even(len(self.costs), self.num_stages).boundaries

    def slowest_ms(self, boundaries: Sequence[int]) -> Fraction:
        """Time of the slowest stage, exactly: of two splits one can tell which is better."""
        (costs, extras), unit = to_integers(self.costs, [self.first, self.last])
        sums = [0, *accumulate(costs)]
        stages = [sums[b] - sums[a] for a, b in pairwise(boundaries)]
        stages[0] += extras[0]
        stages[-1] += extras[1]
        return max(stages) * unit


# ------------------------------------------------------------------------------- cases


def make_chains(num_layers: int, num_stages: int) -> list[Chain]:
    """The six shapes at one size; the same numbers every time."""
    rng, share = np.random.default_rng([num_layers, num_stages]), num_layers / num_stages
    giant = [1.0] * num_layers
    giant[num_layers // 3] = share
    half = num_layers // 2
    return [
        Chain("equal", num_stages, [1.0] * num_layers),
        Chain("heavy output", num_stages, [1.0] * num_layers, last=0.75 * share),
        Chain("one giant", num_stages, giant),
        _moe(num_layers, num_stages),
        Chain("random", num_stages, rng.uniform(0.5, 1.5, num_layers).tolist()),
        # Frozen layers have no backward, which takes two thirds of the time.
        Chain("freezing front", num_stages, [1.0] * half + [3.0] * (num_layers - half)),
    ]


def _moe(num_layers: int, num_stages: int) -> Chain:
    """Skewed routing, as the simulator's scenario has it in its first iteration."""
    trace = make_scenario("moe").trace(TransformerModel(num_layers), 1, seed=1)
    costs = (trace.forward_ms + trace.backward_ms)[0].tolist()
    first, last = (trace.extra_forward_ms + trace.extra_backward_ms)[0].tolist()
    return Chain("MoE skew", num_stages, costs, first, last)


# ------------------------------------------------------------------------------- balancers


def _partition(chain: Chain) -> list[int]:
    return partition(
        chain.costs, chain.num_stages, first_stage_extra=chain.first, last_stage_extra=chain.last,
        min_layers=0,
    )  # fmt: skip


def _diffuse(chain: Chain, relay: bool) -> list[int]:
    return diffusion(
        chain.costs, chain.even, first_stage_extra=chain.first, last_stage_extra=chain.last,
        min_layers=0, relay=relay,
    ).boundaries  # fmt: skip


def _virtual(chain: Chain) -> VirtualPartition:
    return partition_virtual(
        chain.costs, chain.num_stages, VIRTUAL_STAGES, first_stage_extra=chain.first,
        last_stage_extra=chain.last, min_layers=0,
    )  # fmt: skip


@dataclass(frozen=True)
class Balancer:
    """What is compared.

    Attributes:
        name: in the results.
        run: the work that is timed.
        most_stages: beyond which it takes minutes.
    """

    name: str
    run: Callable[[Chain], Sequence[int] | VirtualPartition]
    most_stages: int = 10**6


BALANCERS = (
    Balancer("partition", _partition),
    Balancer("virtual", _virtual, most_stages=100),
    Balancer("diffusion", lambda chain: _diffuse(chain, relay=True), most_stages=100),
    Balancer("diffusion without relays", lambda chain: _diffuse(chain, relay=False)),
    Balancer("DeepSpeed", lambda chain: deepspeed_split(chain.weights, chain.num_stages)),
    Balancer("paper's diffusion", lambda chain: paper_diffusion(chain.weights, chain.even)),
    Balancer("uniform", lambda chain: chain.even),
)


def measure(balancer: Balancer, chain: Chain, best_of: int) -> dict[str, Any]:
    """One cell of the results."""
    times_s: list[float] = []
    while len(times_s) < best_of and sum(times_s) < LONG_S:
        begin = time.perf_counter()
        answer = balancer.run(chain)
        times_s.append(time.perf_counter() - begin)
    if isinstance(answer, VirtualPartition):
        slowest, optimum = Fraction(answer.peak), Fraction(answer.lower_bound)
    else:
        slowest, optimum = chain.slowest_ms(answer), chain.slowest_ms(_partition(chain))
    return {
        "layers": len(chain.costs),
        "stages": chain.num_stages,
        "case": chain.case,
        "balancer": balancer.name,
        "slowest_ms": float(slowest),
        "ratio_to_optimum": float(slowest / optimum),
        "time_ms": round(min(times_s) * 1e3, 4),
    }


# ------------------------------------------------------------------------------- the command


def main() -> int:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the cells as JSON")
    parser.add_argument("--quick", action="store_true", help="a few sizes, once; writes no file")
    args = parser.parse_args()
    sizes, best_of = (QUICK_SIZES, 1) if args.quick else (SIZES, BEST_OF)
    tasks = [
        (balancer, chain)
        for size in sizes
        for chain in make_chains(*size)
        for balancer in BALANCERS
        if chain.num_stages <= balancer.most_stages
    ]
    shown = track(tasks, "balancing", console=Console(stderr=True), transient=True)
    cells = [measure(balancer, chain, best_of) for balancer, chain in shown]
    if args.json:
        print(json.dumps(cells, indent=2))
    else:
        show(cells)
    if not args.quick:
        path = write_results("balancers", "real", "make bench-balancers", cells)
        Console(stderr=True).print(f"written to {path}")
    return 0


def show(cells: Sequence[dict[str, Any]]) -> None:
    """Print a table of ratios and one of times."""
    found = {
        (cell["layers"], cell["stages"], cell["case"], cell["balancer"]): cell for cell in cells
    }
    rows = dict.fromkeys(key[:3] for key in found)
    for title, name, form in (
        ("slowest stage over the smallest possible", "ratio_to_optimum", "{:.4f}"),
        ("time in ms, best of several", "time_ms", "{:.3g}"),
    ):
        table = Table(title=title)
        for heading in ("layers x stages", "case"):
            table.add_column(heading)
        for balancer in BALANCERS:
            table.add_column(balancer.name, justify="right")
        size: tuple[int, int] | None = None
        for row in rows:
            if size not in (None, row[:2]):
                table.add_section()
            values = [found.get((*row, balancer.name)) for balancer in BALANCERS]
            table.add_row(
                f"{row[0]:,} x {row[1]:,}" if size != row[:2] else "",
                row[2],
                *("" if cell is None else form.format(cell[name]) for cell in values),
            )
            size = row[:2]
        console.print(table)
    console.print(
        f"virtual: {VIRTUAL_STAGES} chunks a rank, ratio to a proven lower bound. Empty: takes "
        "minutes at that size."
    )


if __name__ == "__main__":
    sys.exit(main())

"""What moving layers brings when costs change: eight emulated pipeline ranks under three policies.

Each case is trained with real Megatron in virtual time (docs/emulation.md) with its start layout
kept, with the best layout that a run without moves could have had, known in hindsight, and with
megatron_dynmo left to itself with its default settings.

    make bench-trigger
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_dynmo.emulate.devices import Emulation
from megatron_dynmo.emulate.emulation_file import emulation_from_json
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.pipeline_schedule import times_1f1b
from scripts.results import ROOT, write_results
from tests.e2e.emulation import MESSAGE_BYTES, of_kind, run_emulated

NUM_STAGES = 8
NUM_LAYERS = 24
NUM_MICROBATCHES = 8
ITERATIONS = 90
EVEN = (3,) * NUM_STAGES
# The time of a run may exceed that of its start layout by this before the benchmark fails.
TOLERATED = 1.005

console = Console()


def step(**from_iteration: float) -> dict[str, Any]:
    """A number that steps: `step(i1=1, i30=3)`."""
    return {"kind": "step", "from": {name[1:]: value for name, value in from_iteration.items()}}


def scaled(layer_numbers: range, scale: Any) -> list[dict[str, Any]]:
    """Rows that scale some layers."""
    return [{"layer_number": layer_number, "scale": scale} for layer_number in layer_numbers]


@dataclass(frozen=True)
class Case:
    """One way in which costs change.

    Attributes:
        name: what the table calls it.
        changes: fields of the emulation beside those that all cases have.
        start: layers on each rank at the start.
        settled: iterations over which the median is taken.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    start: tuple[int, ...] = EVEN
    settled: range = range(20, ITERATIONS + 1)

    @property
    def document(self) -> dict[str, Any]:
        """The emulation file."""
        return {
            "num_layers": NUM_LAYERS,
            "every_layer": {"forward_ms": 2.0, "backward_ms": 4.0, "memory_bytes": 400_000_000},
            "first_stage_extra": {"forward_ms": 0.5, "backward_ms": 0.5},
            "last_stage_extra": {"forward_ms": 2.0, "backward_ms": 4.0},
            "optimizer_ms": 4.0,
            "link": {"latency_ms": 0.05, "bandwidth_gb_s": 25, "message_bytes": 16_777_216},
            "migration": {"bandwidth_gb_s": 25, "rebuild_ms": 150},
            **self.changes,
        }

    @cached_property
    def emulation(self) -> Emulation:
        """What the file says."""
        return emulation_from_json(self.document)


def ramp(first_iteration: int, last_iteration: int, before: float, after: float) -> dict[str, Any]:
    """A number that grows or falls evenly."""
    return {
        "kind": "ramp",
        "first_iteration": first_iteration,
        "last_iteration": last_iteration,
        "before": before,
        "after": after,
    }


WAVE = {"kind": "oscillation", "low": 1.0, "high": 2.0, "period_iters": 4}
CASES = (
    Case("uneven start", start=(6, 4, 3, 3, 3, 2, 2, 1)),
    Case(
        "step change",
        {"layers": scaled(range(1, 7), step(i1=1.0, i30=2.0))},
        settled=range(45, ITERATIONS + 1),
    ),
    Case("drift", {"layers": scaled(range(1, 13), ramp(10, 80, 1.0, 0.2))}),
    Case("oscillation", {"layers": scaled(range(1, 7), WAVE)}),
    # A light output layer: with a heavy one whole layers leave nothing to gain by the recovery.
    Case(
        "straggler",
        {
            "speeds": {"3": step(i1=1.0, i20=0.5, i60=1.0)},
            "last_stage_extra": {"forward_ms": 0.5, "backward_ms": 1.0},
        },
        settled=range(30, 60),
    ),
)


def main() -> int:
    """Run all cases and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-trigger")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    cells: list[dict[str, Any]] = []
    for case in CASES:
        if args.case is None or case.name in args.case:
            cells += measure(case, args.folder / case.name.replace(" ", "-"))
    show(cells)
    if args.case is None:
        write_results("trigger", "emulated", "make bench-trigger", cells)
    worse = [cell for cell in cells if cell["ratio_to_static"] > TOLERATED]
    for cell in worse:
        console.print(f"[red]{cell['case']}: {cell['policy']} is slower than static[/red]")
    return bool(worse)


def measure(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Run one case under every policy."""
    best = best_static(case)
    policies = {
        "static": (case.start, ("--dynmo-mode", "observe")),
        "best static in hindsight": (best, ("--dynmo-mode", "observe")),
        "ours": (case.start, ()),
    }
    cells = []
    for policy, (sizes, flags) in policies.items():
        with console.status(f"{case.name}: {policy}"):
            events = run_emulated(
                folder / policy.replace(" ", "-"),
                case.document,
                text_of(sizes),
                *flags,
                num_stages=NUM_STAGES,
                num_layers=NUM_LAYERS,
                num_microbatches=NUM_MICROBATCHES,
                iterations=ITERATIONS,
                timeout_s=900,
            )
        cells.append({"case": case.name, "policy": policy, **summary(events, case)})
    check_closed_form(case, best, cells[1])
    static, hindsight, _ = (cell["total_ms"] for cell in cells)
    for cell in cells:
        cell["ratio_to_best_static"] = cell["total_ms"] / hindsight
        cell["ratio_to_static"] = cell["total_ms"] / static
    return cells


def summary(events: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    """What a run took: all its iterations and moves, and one iteration once it had settled."""
    times = {event["iteration"]: event["iteration_ms"] for event in of_kind(events, "iteration")}
    assert len(times) == ITERATIONS, f"{len(times)} iterations were logged"
    moves = of_kind(events, "migration")
    actions = Counter(event["action"] for event in of_kind(events, "decision"))
    return {
        "iteration_ms": statistics.median(times[iteration] for iteration in case.settled),
        "total_ms": sum(times.values()) + sum(move["duration_ms"] for move in moves),
        "moves": len(moves),
        "rollbacks": actions["rollback"],
    }


def check_closed_form(case: Case, sizes: tuple[int, ...], cell: dict[str, Any]) -> None:
    """Stop if a run without moves did not take what the closed form says of it."""
    layout = LayerLayout.from_megatron(text_of(sizes), num_layers=NUM_LAYERS, num_stages=NUM_STAGES)
    expected = sum(
        case.emulation.predict_ms(layout, iteration, NUM_MICROBATCHES, MESSAGE_BYTES)
        for iteration in range(1, ITERATIONS + 1)
    )
    if abs(cell["total_ms"] / expected - 1) > 1e-9:
        sys.exit(f"{case.name}: {cell['total_ms']} ms, the closed form says {expected}")


def best_static(case: Case) -> tuple[int, ...]:
    """The layout of all that give each rank a layer under which the whole run takes least.

    Exhaustive: every layout is timed under the costs of every iteration.
    """
    splits = np.array(
        [
            (0, *cuts, NUM_LAYERS)
            for cuts in itertools.combinations(range(1, NUM_LAYERS), NUM_STAGES - 1)
        ]
    )
    with console.status(f"{case.name}: timing {len(splits)} layouts"):
        totals = np.zeros(len(splits))
        for forward, backward, count in states(case):
            totals += count * finish_ms(splits, forward, backward, case.emulation)
    sizes = np.diff(splits[int(np.argmin(totals))])
    return tuple(int(size) for size in sizes)


type Times = NDArray[np.float64]
type State = tuple[tuple[float, ...], tuple[float, ...]]


def states(case: Case) -> Iterator[tuple[State, State, int]]:
    """Each different state of costs, as (times of layers and edges, speeds), and how often it is.

    Yields:
        (forward, backward, iterations), each pass as its times and the ranks' speeds.
    """
    found: Counter[tuple[State, State]] = Counter()
    for iteration in range(1, ITERATIONS + 1):
        costs = case.emulation.costs(iteration, NUM_MICROBATCHES)
        speeds = tuple(case.emulation.speed(rank, iteration) for rank in range(NUM_STAGES))
        units = (costs.first_stage_extra, *costs.layers, costs.last_stage_extra)
        forward = tuple(unit.forward_ms for unit in units)
        backward = tuple(unit.backward_ms for unit in units)
        found[(forward, speeds), (backward, speeds)] += 1
    for (forward, backward), count in found.items():
        yield forward, backward, count


def finish_ms(
    splits: NDArray[np.int_], forward: State, backward: State, emulation: Emulation
) -> Times:
    """When the schedule ends under each split [splits]; the optimizer is the same for all."""

    def stage_times(state: State) -> Times:
        times, speeds = state
        sums = np.concatenate([[0.0], np.cumsum(times[1:-1])])
        stages = np.diff(sums[splits], axis=1)
        stages[:, 0] += times[0]
        stages[:, -1] += times[-1]
        return stages / np.array(speeds)

    ends = times_1f1b(
        stage_times(forward),
        stage_times(backward),
        NUM_MICROBATCHES,
        emulation.link.hop_ms(MESSAGE_BYTES),
    )
    result: Times = ends.max(axis=1)
    return result


def text_of(sizes: tuple[int, ...]) -> str:
    """Layout string of these numbers of layers by rank."""
    return "E" + "|".join("t" * size for size in sizes) + "L"


def show(cells: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(
        title=f"Emulated: {NUM_LAYERS} layers on {NUM_STAGES} pipeline ranks, {ITERATIONS} "
        "iterations (virtual time, moves included in the whole run)"
    )
    for name in ("case", "policy"):
        table.add_column(name)
    for name in ("ms an iteration, settled", "s in all", "moves", "roll-backs", "to best static"):
        table.add_column(name, justify="right")
    for cell in cells:
        table.add_row(
            cell["case"],
            cell["policy"],
            f"{cell['iteration_ms']:.1f}",
            f"{cell['total_ms'] / 1e3:.2f}",
            str(cell["moves"]),
            str(cell["rollbacks"]),
            f"{cell['ratio_to_best_static']:.3f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

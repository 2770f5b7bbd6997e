"""What packing costs and brings: emulated pipeline ranks whose load collapses, and grows again.

Real Megatron in virtual time (docs/emulation.md) packs itself to fewer stages and comes back. The
throughput is virtual; how long ranks take to leave and to come back is real, on this machine.

    make bench-elastic
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_dynmo.layout import LayerLayout
from scripts.results import ROOT, write_results
from tests.e2e.emulation import MESSAGE_BYTES, of_kind, run_emulated

NUM_MICROBATCHES = 16
COLLAPSE, GROWTH, END = 8, 45, 75
console = Console()


@dataclass(frozen=True)
class Case:
    """A load that collapses in all but the last layers.

    Attributes:
        num_stages: pipeline ranks.
        num_layers: decoder layers.
        num_heavy: last layers that keep their cost.
    """

    num_stages: int
    num_layers: int
    num_heavy: int

    @property
    def document(self) -> dict[str, Any]:
        """The emulation file."""
        frozen = {"kind": "step", "from": {"1": 1.0, str(COLLAPSE): 0.001, str(GROWTH): 1.0}}
        heavy = range(self.num_layers - self.num_heavy + 1, self.num_layers + 1)
        return {
            "num_layers": self.num_layers,
            "every_layer": {
                "forward_ms": 10.0,
                "backward_ms": 20.0,
                "memory_bytes": 400_000_000,
                "scale": frozen,
            },
            "layers": [{"layer_number": number, "scale": 1.0} for number in heavy],
            "link": {"latency_ms": 0.05, "bandwidth_gb_s": 25, "message_bytes": MESSAGE_BYTES},
            "migration": {"bandwidth_gb_s": 25, "rebuild_ms": 150},
        }


CASES = (Case(4, 8, 2), Case(8, 16, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "elastic")
    folder = parser.parse_args().runs
    shutil.rmtree(folder, ignore_errors=True)
    cells = [measure(case, folder / f"{case.num_stages}") for case in CASES]
    write_results("elastic", "emulated", "make bench-elastic", cells)
    show(cells)


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case with packing and without, and return its cell."""
    with console.status(f"{case.num_stages} stages: packing"):
        packed = train(case, folder / "on", "--dynmo-pack", "on")
    with console.status(f"{case.num_stages} stages: all of them throughout"):
        whole = train(case, folder / "off", "--dynmo-pack", "off")
    pack, back = of_kind(packed, "pack")[0], of_kind(packed, "rejoin")[0]
    settled = range(pack["iteration"] + 5, GROWTH)
    return {
        "case": f"{case.num_layers} layers on {case.num_stages} stages, "
        f"all but the last {case.num_heavy} collapse",
        "seconds_to_release": since_decision(packed, pack),
        "seconds_to_rejoin": since_decision(packed, back),
        "throughput_before": throughput(whole, settled),
        "throughput_after": throughput(packed, settled),
        "ranks_before": case.num_stages,
        "ranks_after": case.num_stages - len(pack["ranks"]),
        "loss_equal": losses(packed) == losses(whole),
    }


def train(case: Case, folder: Path, *flags: str) -> list[dict[str, Any]]:
    return run_emulated(
        folder,
        case.document,
        LayerLayout.even(case.num_layers, case.num_stages).to_megatron(),
        *flags,
        num_stages=case.num_stages,
        num_layers=case.num_layers,
        num_microbatches=NUM_MICROBATCHES,
        iterations=END,
        timeout_s=600,
    )


def since_decision(events: list[dict[str, Any]], change: dict[str, Any]) -> float:
    """Seconds from the decision to the first moment at which the new stages train."""
    decided = [
        event["time_s"]
        for event in of_kind(events, "decision")
        if event["action"] == "pack" and event["iteration"] == change["iteration"]
    ]
    return float(change["time_s"] - decided[-1])


def throughput(events: list[dict[str, Any]], iterations: range) -> float:
    """Median tokens a virtual second."""
    return statistics.median(
        event["tokens_per_s"]
        for event in of_kind(events, "iteration")
        if event["iteration"] in iterations
    )


def losses(events: list[dict[str, Any]]) -> list[str]:
    return [event["lm_loss_hex"] for event in of_kind(events, "iteration")]


def show(cells: list[dict[str, Any]]) -> None:
    table = Table(title="Emulated: a load that collapses, packed to fewer stages and back")
    for name in ("case", "stages", "s to release", "s to rejoin", "tokens/s", "a rank", "exact"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for cell in cells:
        before, after = cell["throughput_before"], cell["throughput_after"]
        ratio = cell["ranks_before"] / cell["ranks_after"]
        table.add_row(
            cell["case"],
            f"{cell['ranks_before']} > {cell['ranks_after']}",
            f"{cell['seconds_to_release']:.2f}",
            f"{cell['seconds_to_rejoin']:.2f}",
            f"{after / before:.3f}x",
            f"{after / before * ratio:.2f}x",
            str(cell["loss_equal"]),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

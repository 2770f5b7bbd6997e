"""What packing costs and brings: a load that collapses and grows, and nodes given to SLURM.

Emulated ranks run real Megatron in virtual time (docs/emulation.md), pack themselves to fewer
stages and come back. The throughput is virtual; how long ranks take to leave and to come back is
real, on this machine. Where SLURM is installed, a real one with four virtual nodes takes nodes back
and gives them again.

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
from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.telemetry.events import read_events
from scripts.results import ROOT, write_results
from tests.e2e.emulation import MESSAGE_BYTES, of_kind, run_emulated
from tests.slurm.cluster import is_installed, local_cluster
from tests.slurm.runs import collapsing, restarting

NUM_MICROBATCHES = 16
COLLAPSE, GROWTH, END = 8, 30, 75
MAX_SLOWDOWN_PCT = 2.0
console = Console()

type Events = list[dict[str, Any]]


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
        light = {"kind": "step", "from": {"1": 1.0, str(COLLAPSE): 0.001, str(GROWTH): 1.0}}
        heavy = range(self.num_layers - self.num_heavy + 1, self.num_layers + 1)
        return {
            "num_layers": self.num_layers,
            "every_layer": {
                "forward_ms": 10.0,
                "backward_ms": 20.0,
                "memory_bytes": 400_000_000,
                "scale": light,
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
    cells = [emulated(case, folder / f"{case.num_stages}") for case in CASES]
    show(cells)
    if is_installed():
        cells += [give_back(folder / "released"), ask_again(folder / "restarted")]
        console.print(*cells[-2:], sep="\n")
    write_results("elastic", "emulated", "make bench-elastic", cells)


def emulated(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case with packing and without, and return its cell."""
    with console.status(f"{case.num_stages} stages: packing"):
        packed = train(case, folder / "on", "--dynmo-pack", "on")
    with console.status(f"{case.num_stages} stages: all of them throughout"):
        whole = train(case, folder / "off", "--dynmo-pack", "off")
    pack, back = of_kind(packed, "pack")[0], of_kind(packed, "rejoin")[0]
    settled = range(pack["iteration"] + 5, GROWTH)
    before, after = throughput(whole, settled), throughput(packed, settled)
    remaining = case.num_stages - len(pack["ranks"])
    return {
        "case": f"{case.num_layers} layers on {case.num_stages} emulated ranks, all but the last "
        f"{case.num_heavy} collapse",
        "ranks_before": case.num_stages,
        "ranks_after": remaining,
        "seconds_to_released": since_decision(packed, pack),
        "seconds_to_rejoined": since_decision(packed, back),
        "tokens_per_virtual_s_before": before,
        "tokens_per_virtual_s_after": after,
        "tokens_per_virtual_s_and_rank_before": before / case.num_stages,
        "tokens_per_virtual_s_and_rank_after": after / remaining,
        "total_change_pct": 100 * (after / before - 1),
        "is_within_allowed": after >= before / (1 + MAX_SLOWDOWN_PCT / 100),
        "max_slowdown_pct": MAX_SLOWDOWN_PCT,
        "loss_equal": losses(packed) == losses(whole),
    }


def train(case: Case, folder: Path, *flags: str) -> Events:
    return run_emulated(
        folder,
        case.document,
        LayerLayout.even(case.num_layers, case.num_stages).to_megatron(),
        *("--dynmo-pack-max-slowdown-pct", str(MAX_SLOWDOWN_PCT), *flags),
        num_stages=case.num_stages,
        num_layers=case.num_layers,
        num_microbatches=NUM_MICROBATCHES,
        iterations=END,
        timeout_s=600,
    )


def give_back(folder: Path) -> dict[str, Any]:
    """Give two of four nodes back to a real SLURM, in which a job waits for them."""
    folder.mkdir(parents=True)
    second = folder / "second.sh"
    second.write_text("#!/bin/sh\ndate +%s.%N\n")
    with console.status("SLURM: two of four nodes go back"), local_cluster(folder) as cluster:
        job = cluster.train("packed", *collapsing(folder, "packed"))
        waiting = cluster.submit("second", 2, second)
        assert cluster.wait_for_end(waiting, 600) == "COMPLETED", cluster.output()
        cluster.run("scancel", "--signal=TERM", job)
        assert cluster.wait_for_end(job, 60) == "COMPLETED", cluster.output()
    events = read_events(folder / "packed" / EVENTS_FILE)
    pack, released = of_kind(events, "pack")[0], of_kind(events, "release")[0]
    to_fewer_stages = since_decision(events, pack)
    decided = pack["time_s"] - to_fewer_stages
    return {
        "case": "a real SLURM with four virtual nodes, one rank on each: two are given back",
        "seconds_to_fewer_stages": to_fewer_stages,
        "seconds_to_released": released["time_s"] - decided,
        "seconds_to_second_job": float((folder / "second.out").read_text()) - decided,
    }


def ask_again(folder: Path) -> dict[str, Any]:
    """Need nodes again that were given back: the run starts anew on all four."""
    folder.mkdir(parents=True)
    with console.status("SLURM: all four nodes are needed again"), local_cluster(folder) as cluster:
        cluster.train("grown", *restarting(folder, "grown"))
        cluster.wait_for(lambda: not cluster.run("squeue", "-h"), 600)
    events = read_events(folder / "grown" / EVENTS_FILE)
    asked = of_kind(events, "restart")[0]
    resumed = [e for e in of_kind(events, "iteration") if e["iteration"] > asked["iteration"] + 1]
    return {
        "case": "the same, two of four nodes are needed again: saved, ended, started anew",
        "seconds_to_restarted": resumed[0]["time_s"] - asked["time_s"],
    }


def since_decision(events: Events, change: dict[str, Any]) -> float:
    """Seconds from the decision to the first moment at which the new stages train."""
    decided = [
        event["time_s"]
        for event in of_kind(events, "decision")
        if event["action"] == "pack" and event["iteration"] == change["iteration"]
    ]
    return float(change["time_s"] - decided[-1])


def throughput(events: Events, iterations: range) -> float:
    """Median tokens a virtual second."""
    return statistics.median(
        event["tokens_per_s"]
        for event in of_kind(events, "iteration")
        if event["iteration"] in iterations
    )


def losses(events: Events) -> list[str]:
    return [event["lm_loss_hex"] for event in of_kind(events, "iteration")]


def show(cells: list[dict[str, Any]]) -> None:
    table = Table(title="Emulated: a load that collapses, packed to fewer stages and back")
    for name in ("case", "ranks", "s to leave", "s to rejoin", "tokens/s", "a rank", "exact"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for cell in cells:
        per_rank = [cell[f"tokens_per_virtual_s_and_rank_{when}"] for when in ("before", "after")]
        table.add_row(
            cell["case"],
            f"{cell['ranks_before']} > {cell['ranks_after']}",
            f"{cell['seconds_to_released']:.2f}",
            f"{cell['seconds_to_rejoined']:.2f}",
            f"{cell['total_change_pct']:+.2f} %",
            f"{per_rank[1] / per_rank[0]:.2f}x",
            str(cell["loss_equal"]),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

"""What a move costs: bytes, time by phase, speed against a plain message, extra memory.

Real Megatron on two pipeline ranks over gloo, each rank pinned to a core. A layer goes there and
back several times; after every move one tensor of as many bytes goes the same way, so that both
are measured in the same minute over the same link. It arrives in new memory, as a layer does: on a
CPU the kernel's making of pages takes longer than the copy; the time into memory that was in use
before stands beside it.

    make bench-migration
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import overlapped_moves
from scripts.migration_ranks import Move, measure
from scripts.results import write_results

OVERLAP = "in training"
GOAL_SHARE = 0.8
GOAL_BYTES = 16 * 2**20  # layers of this size and more are to reach it
# So that freed memory is given back, and resident memory is what is in use.
PLAIN_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

console = Console()


@dataclass(frozen=True)
class Cell:
    """One configuration.

    Attributes:
        name: what the table calls it.
        flags: Megatron's.
        ranks: processes, in pairs of pipeline ranks.
    """

    name: str
    flags: tuple[str, ...] = ()
    ranks: int = 2


CELLS = (
    Cell("fp32"),
    Cell("bf16", ("--bf16",)),
    Cell("bf16, a wider layer", ("--bf16", "--hidden-size", "1024", "--ffn-hidden-size", "4096")),
    Cell("bf16, distributed optimizer", ("--bf16", "--use-distributed-optimizer")),
    # Four ranks: where there are two cores, two of them share each.
    Cell(
        "bf16, distributed optimizer over 2 replicas",
        ("--bf16", "--use-distributed-optimizer"),
        ranks=4,
    ),
)


def main() -> int:
    """Run all cells and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="there and back, of each cell")
    parser.add_argument("--overlap-rounds", type=int, default=3, help="runs in training, both ways")
    names = [*(cell.name for cell in CELLS), OVERLAP]
    parser.add_argument("--cell", action="append", choices=names)
    args = parser.parse_args()
    # Before the server of the ranks starts: the C library reads them once.
    os.environ.update(PLAIN_MALLOC)
    from tests.ranks import run_ranks

    rows = []
    for cell in CELLS:
        if args.cell is None or cell.name in args.cell:
            with console.status(cell.name):
                found = run_ranks(measure, cell.ranks, args.rounds, *cell.flags, timeout_s=120)
            rows.append(summary(cell, found))
    if rows:
        show(rows)
    wrong = [row["cell"] for row in rows if not row["digests_equal"]]
    if args.cell is None or args.cell == [OVERLAP]:
        with console.status(OVERLAP):
            row = overlapped_moves.measure(args.overlap_rounds)
        console.print(overlapped_moves.table(row))
        wrong += [row["cell"]] * (not row["loss_equal"])
        rows.append(row)
    if args.cell is None:
        write_results("migration", "real", "make bench-migration", rows)
    for name in wrong:
        console.print(f"[red]{name}: the model has changed[/red]")
    return bool(wrong)


def summary(cell: Cell, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all moves of a cell; memory is that of the rank where it was worst."""
    moves: list[Move] = ranks[0]["moves"]
    layer_bytes = max(rank["layer_bytes"] for rank in ranks)
    extra = {
        phase: max(
            statistics.median(move.peak_bytes[phase] - move.held_bytes for move in rank["moves"])
            for rank in ranks
        )
        for phase in moves[0].peak_bytes
    }
    raw_ms = statistics.median(move.raw_ms for move in moves)
    gathered = [move.gathered_ms for move in moves if move.gathered_ms is not None]
    phase_ms = {
        phase: statistics.median(move.phase_ms[phase] for move in moves)
        for phase in moves[0].phase_ms
    }
    return {
        "cell": cell.name,
        "ranks": cell.ranks,
        "moves": len(moves),
        "layer_bytes": layer_bytes,
        "moved_bytes": moves[0].sent_bytes,
        "duration_ms": statistics.median(move.duration_ms for move in moves),
        "raw_transport_ms": raw_ms,
        "raw_into_used_memory_ms": statistics.median(move.raw_used_ms for move in moves),
        "gathered_ms": statistics.median(gathered) if gathered else None,
        # Of each pair of neighbours in time, so that a slow minute of the machine counts for both.
        "share_of_raw": statistics.median(
            move.raw_ms / move.phase_ms["transfer"] for move in moves
        ),
        "phase_ms": phase_ms,
        "rebuild_ms": phase_ms["commit"] + phase_ms["rebuild"],
        "peak_extra_bytes": max(0, *extra.values()),
        "peak_extra_bytes_by_phase": {phase: max(0, value) for phase, value in extra.items()},
        "bound_bytes": layer_bytes,
        "digests_equal": all(rank["digests_equal"] for rank in ranks),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table and what was not reached."""
    table = Table(title="Moving one layer (real, medians; MiB, ms)")
    table.add_column("cell")
    phases = list(rows[0]["phase_ms"])
    columns = (
        "moved",
        "whole move",
        *phases,
        "raw message",
        "into used memory",
        "shards gathered",
        "share of raw",
        "extra",
        "bound",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["cell"],
            f"{row['moved_bytes'] / 2**20:.1f}",
            f"{row['duration_ms']:.0f}",
            *(f"{row['phase_ms'][phase]:.0f}" for phase in phases),
            f"{row['raw_transport_ms']:.0f}",
            f"{row['raw_into_used_memory_ms']:.0f}",
            "" if row["gathered_ms"] is None else f"{row['gathered_ms']:.0f}",
            f"{row['share_of_raw']:.0%}",
            f"{row['peak_extra_bytes'] / 2**20:.1f}",
            f"{row['bound_bytes'] / 2**20:.1f}",
        )
    console.print(table)
    for row in rows:
        if row["moved_bytes"] >= GOAL_BYTES and row["share_of_raw"] < GOAL_SHARE:
            console.print(
                f"[yellow]{row['cell']}: {row['share_of_raw']:.0%} of the raw message's speed, "
                f"aimed at is {GOAL_SHARE:.0%}[/yellow]"
            )
        if row["peak_extra_bytes"] > row["bound_bytes"]:
            worst = max(row["peak_extra_bytes_by_phase"].items(), key=lambda item: item[1])
            console.print(
                f"[yellow]{row['cell']}: {row['peak_extra_bytes'] / 2**20:.1f} MiB beside what "
                f"the rank holds before or after the move, most of it in {worst[0]}; the bound "
                f"is {row['bound_bytes'] / 2**20:.1f} MiB[/yellow]"
            )


if __name__ == "__main__":
    sys.exit(main())

"""For how long training stands still for a move, at once and with state that follows.

Part of `make bench-migration`: real training that moves a layer there and back, in interleaved runs
with and without `--dynmo-overlap-moves`. Each rank has one core, which the thread that sends or
receives shares with the iteration: the worst case, so the whole time stands beside the wait.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.telemetry.events import read_events

ITERATIONS = 17
FIRST = 3  # moments exist, allocators and links are warm
HERE, THERE = "Ett|ttL", "Et|tttL"
MOVES = ";".join(
    f"{iteration}:{THERE if index % 2 == 0 else HERE}"
    for index, iteration in enumerate(range(FIRST - 1, ITERATIONS, 2))
)
MODEL = f"""
    --num-layers 4 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4
    --train-iters {ITERATIONS} --lr 1e-4 --lr-decay-iters {ITERATIONS} --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1000 --split 98,1,1 --log-interval 1
    --eval-iters 0 --eval-interval 1000 --num-workers 0 --attention-dropout 0 --hidden-dropout 0
    --bf16 --pipeline-model-parallel-size 2 --dynmo-force-layout {MOVES}
""".split()


def train(rank: int, world_size: int, *flags: str) -> None:
    """Be one rank, on a core of its own."""
    from megatron_dynmo import pretrain_gpt

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    pretrain_gpt.main([*MODEL, *flags])


def measure(rounds: int) -> dict[str, Any]:
    """Run both ways in turn.

    Returns:
        A row of medians: `stall_ms` for which training stood still, without and with overlap;
        `overlapped_ms` for which state travelled meanwhile; `wall_ms` of two iterations with a
        move between them, both ways; `loss_equal`, whether all runs had the same losses.
    """
    from tests.ranks import run_ranks

    found: dict[bool, list[dict[str, list[Any]]]] = {False: [], True: []}
    for number in range(rounds):
        # The order changes, so that neither always has the cooler machine.
        for overlaps in (False, True) if number % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                flags = ("--dynmo-log-dir", folder, *(("--dynmo-overlap-moves",) * overlaps))
                run_ranks(train, 2, *flags, timeout_s=300)
                found[overlaps].append(_read(Path(folder)))
    runs = [*found[False], *found[True]]

    def median(overlaps: bool, name: str) -> float:
        return statistics.median(value for run in found[overlaps] for value in run[name])

    return {
        "cell": "bf16, a wider layer, in training",
        "ranks": 2,
        "moves": sum(len(run["stall_ms"]) for run in runs) // 2,
        "moved_bytes": runs[0]["bytes"][0],
        "stall_ms": median(False, "stall_ms"),
        "stall_overlapped_ms": median(True, "stall_ms"),
        "overlapped_ms": median(True, "overlapped_ms"),
        "wall_ms": median(False, "wall_ms"),
        "wall_overlapped_ms": median(True, "wall_ms"),
        "loss_equal": all(run["losses"] == runs[0]["losses"] for run in runs),
    }


def _read(folder: Path) -> dict[str, list[Any]]:
    events = list(read_events(folder / EVENTS_FILE))
    iterations = [event for event in events if event["event"] == "iteration"]
    moves = [e for e in events if e["event"] == "migration" and e["iteration"] >= FIRST]
    ended_s = {event["iteration"]: event["time_s"] for event in iterations}
    return {
        "losses": [event["lm_loss_hex"] for event in iterations],
        "bytes": [move["bytes"] for move in moves],
        "stall_ms": [move["duration_ms"] for move in moves],
        "overlapped_ms": [move["overlapped_ms"] for move in moves],
        "wall_ms": [
            (ended_s[move["iteration"] + 1] - ended_s[move["iteration"] - 1]) * 1e3
            for move in moves
        ],
    }


def table(row: dict[str, Any]) -> Table:
    """The row for people."""
    made = Table(title=f"A move in training ({row['cell']}; real, medians; ms)")
    for column in ("", "training stands still", "state travels meanwhile", "two iterations"):
        made.add_column(column, justify="right" if column else "left")
    ways = (
        ("at once", "stall_ms", None, "wall_ms"),
        ("state follows", "stall_overlapped_ms", "overlapped_ms", "wall_overlapped_ms"),
    )
    for name, *fields in ways:
        made.add_row(name, *(f"{row[field]:.0f}" if field else "" for field in fields))
    return made

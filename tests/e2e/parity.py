"""One cell of the parity table: the same run unmoved and moved, compared bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.telemetry.events import read_events
from tests.e2e.training import TINY_GPT
from tests.ranks import run_ranks

ITERATIONS = 12


@dataclass(frozen=True)
class Cell:
    """A configuration of a tiny GPT and the moves to make in it.

    Attributes:
        name: what the table calls it.
        ranks: processes.
        flags: Megatron's flags beside those of the tiny model.
        moves: text of --dynmo-force-layout.
        iterations: length of the run.
    """

    name: str
    ranks: int
    flags: tuple[str, ...]
    moves: str
    iterations: int = ITERATIONS

    @property
    def num_moves(self) -> int:
        """How many moves the text asks for."""
        return len(self.moves.split(";"))


@dataclass
class Trace:
    """What one run left in its log, as exact text."""

    losses: dict[int, str] = field(default_factory=dict)
    grad_norms: dict[int, str] = field(default_factory=dict)
    digests: dict[int, dict[str, Any]] = field(default_factory=dict)
    migrations: list[dict[str, Any]] = field(default_factory=list)


def drop_in(rank: int, world_size: int, *argv: str) -> None:
    """Be one rank of the drop-in."""
    from megatron_dynmo import pretrain_gpt

    pretrain_gpt.main(list(argv))


def train(cell: Cell, moves: str, log_dir: Path, *extra: str) -> Trace:
    """Run a cell with these moves and read its log."""
    run_ranks(
        drop_in,
        cell.ranks,
        *TINY_GPT,
        "--train-iters",
        str(cell.iterations),
        "--lr-decay-iters",
        str(cell.iterations),
        "--clip-grad",
        "1.0",
        *cell.flags,
        "--dynmo-log-dir",
        str(log_dir),
        "--dynmo-digest-interval",
        "1",
        "--dynmo-force-layout",
        moves,
        *extra,
        timeout_s=240,
        log_dir=log_dir / "ranks",
    )
    return read_trace(log_dir)


def read_trace(log_dir: Path) -> Trace:
    """Read the events of a run."""
    trace = Trace()
    for event in read_events(log_dir / EVENTS_FILE):
        iteration = event["iteration"]
        if event["event"] == "iteration":
            trace.losses[iteration] = event["lm_loss_hex"]
            trace.grad_norms[iteration] = event["grad_norm_hex"]
        elif event["event"] == "digest":
            trace.digests[iteration] = {
                **event["layers"],
                "embedding": event["embedding"],
                "output": event["output"],
            }
        elif event["event"] == "migration":
            trace.migrations.append(event)
    return trace


def compare(cell: Cell, folder: Path, *extra: str) -> dict[str, Any]:
    """Run a cell unmoved and moved and return its row of the table.

    The unmoved twin is told to move after its last iteration, so that both run the same code.
    """
    last = cell.moves.rpartition(";")[2].partition(":")[2]
    still = train(cell, f"{cell.iterations + 1}:{last}", folder / "still", *extra)
    moved = train(cell, cell.moves, folder / "moved", *extra)
    assert sorted(still.losses) == list(range(1, cell.iterations + 1))
    assert not still.migrations and len(moved.migrations) == cell.num_moves
    follows = "--dynmo-overlap-moves" in cell.flags
    assert all((move["overlapped_ms"] > 0) == follows for move in moved.migrations)
    return {
        "cell": cell.name,
        "moves": len(moved.migrations),
        "loss_equal": still.losses == moved.losses and still.grad_norms == moved.grad_norms,
        "digests_equal": still.digests == moved.digests and len(moved.digests) == cell.iterations,
    }

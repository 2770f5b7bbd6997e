"""The table of faults: what may go wrong in a move, where, and how it must end."""

import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from scripts.results import FOLDER, ROOT, write_results

DOCUMENT = ROOT / "docs" / "faults.md"
RESULTS = FOLDER / "faults.json"
COMMAND = "make test-matrix"

# The last one is that of moves whose optimizer state follows while the next iteration computes.
PHASES = ("prepare", "transfer", "commit", "rebuild", "verify", "landing")
KINDS = ("exception", "out of memory", "wrong shape", "timeout", "killed process")
BITFLIP = "flipped bit"
CONTINUED, STOPPED, HANG, SILENT = "continued", "stopped_clean", "hang", "silent"

MEMORY = "numbers, PP 3"
REAL = "Megatron, PP 2"
REAL_DP = "Megatron, PP 2 x DP 2"


class Cell(NamedTuple):
    """One fault.

    Attributes:
        run: what is moved: a stage of numbers, or real training.
        phase: phase of the move that it strikes.
        rank: global rank that it strikes.
        fault: what happens there.
    """

    run: str
    phase: str
    rank: int
    fault: str

    @property
    def name(self) -> str:
        """Name of a test."""
        return f"{self.run}: {self.fault} in {self.phase} on rank {self.rank}"


MEMORY_CELLS = [
    *(Cell(MEMORY, phase, rank, kind) for phase, kind, rank in product(PHASES, KINDS, range(3))),
    *(Cell(MEMORY, phase, rank, BITFLIP) for phase in ("transfer", "landing") for rank in range(3)),
]

# In real training a fault strikes a method of the stage: phase -> methods called there.
REAL_CELLS = [
    *(
        Cell(REAL, phase, rank, f"exception in {method}")
        for phase, method in (
            ("prepare", "prepare"),
            ("prepare", "settle"),
            ("prepare", "fingerprints"),
            ("transfer", "parcel"),
            ("transfer", "slots"),
            ("transfer", "accept"),
            ("commit", "commit"),
            ("rebuild", "rebuild"),
            ("rebuild", "restore"),
            ("verify", "fingerprints"),
        )
        for rank in range(2)
    ),
    *(Cell(REAL, "transfer", rank, "killed process") for rank in range(2)),
    *(Cell(REAL, "transfer", rank, BITFLIP) for rank in range(2)),
    *(Cell(REAL, "landing", rank, "exception in fingerprint") for rank in range(2)),
    Cell(REAL_DP, "prepare", 1, "exception in prepare"),
    Cell(REAL_DP, "prepare", 1, "exception in settle"),
    Cell(REAL_DP, "prepare", 2, "exception in fingerprints"),
]


def wanted(cell: Cell) -> str:
    """How a cell must end."""
    if cell.phase in ("prepare", "transfer") and cell.fault not in (
        "timeout",
        "killed process",
        BITFLIP,
    ):
        return CONTINUED
    return STOPPED


def write(rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the result file and the document, if the table is whole.

    Cells that were not run now keep what they ended in before.
    """
    before = read() if RESULTS.exists() else []
    outcomes = {
        Cell(r["run"], r["phase"], r["rank"], r["fault"]): r["outcome"] for r in (*before, *rows)
    }
    cells = [*MEMORY_CELLS, *REAL_CELLS]
    if not set(cells) <= set(outcomes):
        return
    ordered = [{**cell._asdict(), "outcome": outcomes[cell]} for cell in cells]
    write_results("faults", "real", COMMAND, ordered)
    DOCUMENT.write_text(document(ordered))


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of the result file."""
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return cells


def document(rows: Iterable[Mapping[str, Any]]) -> str:
    """The table as Markdown; one line for each run, phase and fault, one column for each rank."""
    by_run: dict[str, dict[tuple[str, str], dict[int, str]]] = {}
    for row in rows:
        line = by_run.setdefault(row["run"], {}).setdefault((row["phase"], row["fault"]), {})
        line[row["rank"]] = row["outcome"]
    text = [_HEAD]
    for run, lines in by_run.items():
        ranks = sorted({rank for line in lines.values() for rank in line})
        text.append(f"\n## {run}\n\n{_ABOUT[run]}\n\n")
        text.append(f"| phase | fault | {' | '.join(f'rank {rank}' for rank in ranks)} |\n")
        text.append("| --- | --- |" + " --- |" * len(ranks) + "\n")
        for (phase, fault), line in lines.items():
            found = " | ".join(line.get(rank, "") for rank in ranks)
            text.append(f"| {phase} | {fault} | {found} |\n")
    return "".join(text)


_HEAD = f"""# What happens when a move fails

Written by `{COMMAND}`, which injects one fault after another; not to be edited.

- `{CONTINUED}`: every rank is back in the old layout, with every bit as it was, and goes on; the
  same move, tried again, succeeds.
- `{STOPPED}`: every rank that is alive ends within the timeout, with an error that says which
  layers it holds; training must be started again from the last checkpoint.
- `{HANG}` (a rank was still waiting) and `{SILENT}` (nothing was said, or the model is wrong) must
  not occur.

Phase `landing` is that of moves with `--dynmo-overlap-moves`, whose optimizer state follows while
the next iteration computes: by then the weights have moved, and there is no way back.

How long a rank waits for another is Megatron's `--distributed-timeout-minutes`. A rank that fails
while Megatron rebuilds the optimizer cannot tell the others but by ending: the launcher then ends
the job, and without one the others end when the link breaks or their wait is over.
"""

_ABOUT = {
    MEMORY: "Three ranks with two virtual stages each, whose layers are small tensors; every rank "
    "sends a layer and receives one.",
    REAL: "Real training in bf16 with the distributed optimizer and overlapped gathers. After "
    f"`{CONTINUED}` all losses, gradient norms and digests equal those of a run that never moved.",
    REAL_DP: "The same with two data-parallel ranks at each stage, which gather parameters "
    "together. Ranks 0 and 1 are the first stage.",
}

"""docs/matrix.md: what the random moves showed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

from megatron_dynmo.adapters.support import UNSUPPORTED
from scripts.results import FOLDER, ROOT, write_results
from tests.e2e.matrix import CELLS, ITERATIONS

DOCUMENT = ROOT / "docs" / "matrix.md"
RESULTS = FOLDER / "matrix.json"
_HEAD = f"""# What can be moved

Made by `make test-matrix` from `benchmarks/results/matrix.json`.

Each row is one tiny GPT, trained twice for {ITERATIONS} iterations by real Megatron on a CPU over \
gloo: once unmoved, once
with random moves to random legal layouts, stages without layers among them. "Equal" means the
same bits in every iteration: of the losses and gradient norms, and of the digest of parameters,
persistent buffers, master weights and optimizer state. "State follows": with
`--dynmo-overlap-moves`. `matrix.json` holds the moves themselves.

| Configuration | Ranks | Moves | Losses and norms | Digests |
| --- | --- | --- | --- | --- |
"""
_REFUSED = """
## What is refused

With `--dynmo-mode balance` these end the run before training starts, by name:

| Flag | Why its layers cannot be moved |
| --- | --- |
"""


def document(rows: list[dict[str, Any]]) -> str:
    """The text for these rows of the matrix."""
    said = {True: "equal", False: "DIFFER"}
    table = "".join(
        f"| {row['cell']} | {row['ranks']} | {row['moves']} | {said[row['loss_equal']]} "
        f"| {said[row['digests_equal']]} |\n"
        for row in rows
    )
    total = f"\n{sum(row['moves'] for row in rows)} moves in {len(rows)} configurations.\n"
    refused = "".join(f"| `{feature.flag}` | {feature.reason} |\n" for feature in UNSUPPORTED)
    return f"{_HEAD}{table}{total}{_REFUSED}{refused}"


def write(rows: list[dict[str, Any]]) -> None:
    """Write results and document; rows of cells that did not run this time are kept."""
    by_cell = {row["cell"]: row for row in (*results(), *rows)}
    kept = [by_cell[cell.name] for cell in CELLS if cell.name in by_cell]
    write_results("matrix", "real", "make test-matrix", kept)
    DOCUMENT.write_text(document(kept))


def results() -> list[dict[str, Any]]:
    """The rows of the result file."""
    if not RESULTS.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["cells"]
    return rows

"""How the benchmark of the dynamics shows what it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_TITLES = {
    "real": "Real, 2 cores: ms an iteration over the run, moves included (medians)",
    "emulated": "Emulated, 8 pipeline ranks: virtual ms an iteration over the run, moves included",
}
_STATE_LENGTH = 110


def show(console: Console, block: str, cells: Sequence[dict[str, Any]]) -> None:
    """Print the table of one block."""
    if not cells:
        return
    table = Table(title=_TITLES[block])
    table.add_column("dynamic")
    columns = ["static", "best static", "dynmo", "speed-up", "settled", "to best static"]
    columns += ["whole layers", "any split", "settled"]
    for column in (*columns, "abstract", "losses", "moves"):
        table.add_column(column, justify="right")
    for cell in cells:
        equal = cell["loss_equal"] and cell["digests_equal"]
        table.add_row(
            cell["dynamic"],
            *(f"{cell[name]:.0f}" for name in ("static_ms", "best_static_ms", "dynmo_ms")),
            f"{cell['speedup']:.2f}",
            f"{cell['settled_speedup']:.2f}",
            f"{cell['ratio_to_best_static']:.2f}",
            f"{cell['oracle_speedup']:.2f}",
            f"{cell['ideal_speedup']:.2f}",
            f"{cell['settled_oracle_speedup']:.2f} {cell['settled_ideal_speedup']:.2f}",
            f"{cell['paper_speedup']:.2f}",
            "[green]equal[/green]" if equal else "[red]DIFFERENT[/red]",
            _moves(cell),
        )
    console.print(table)
    console.print(
        "settled: the same over the last third of the run. abstract: DynMo's figure, a maximum "
        "over sizes and baselines."
    )
    console.print(
        "whole layers: the best split for every iteration, moved for nothing. any split: what no "
        "split exceeds, even into fractions of layers. settled: both over the last third."
    )
    if block == "real":
        console.print(
            "They are of the static run's own measurements, whose noise makes them a little larger."
        )
    for cell in cells:
        console.print(f"  {cell['dynamic']}: {cell['why']}")
        if (turns := cell["to_and_fro"]) is not None:
            console.print(
                f"    to and fro in one run: {turns['layout']} is {turns['speedup']:.2f} times as "
                f"fast as {cell['static_layout']} once the dynamic has ended, losses "
                + ("equal" if turns["loss_equal"] else "[red]DIFFERENT[/red]")
            )
        if cell["note"]:
            console.print(f"    {cell['note']}")


def _moves(cell: dict[str, Any]) -> str:
    """How many moves each round made."""
    made = Counter(move["round"] for move in cell["moves"])
    return ", ".join(str(made[number]) for number in range(1, cell["rounds"] + 1))


def show_levels(console: Console, cell: dict[str, Any]) -> None:
    """Print the time of the layers against the state of the dynamic."""
    title = f"{cell['kind']} {cell['dynamic']}: forward + backward of each layer, ms (static run)"
    table = Table(title=title)
    table.add_column("after iteration", justify="right")
    table.add_column("layers")
    table.add_column("sum", justify="right")
    table.add_column("last change", max_width=60)
    for level in cell["levels"]:
        times = [a + b for a, b in zip(level["forward_ms"], level["backward_ms"], strict=True)]
        table.add_row(
            str(level["iteration"]),
            " ".join(f"{ms:.1f}" for ms in times),
            f"{sum(times):.1f}",
            _cut(", ".join(f"{name} {_short(v)}" for name, v in level["state"].items())),
        )
    console.print(table)


def _cut(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= _STATE_LENGTH else text[:_STATE_LENGTH] + " ..."


def _short(value: Any) -> str:
    """A value of an event in a few characters."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return "[" + " ".join(_short(item) for item in value) + "]"
    if isinstance(value, dict):
        return " ".join(f"{key}:{_short(item)}" for key, item in value.items())
    return str(value)

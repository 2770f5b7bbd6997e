"""Does a model still learn when a dynamic makes its layers cheaper?

Each kind trains the same small GPT on the same real text for a few hundred iterations, on one rank.
Its final loss, the mean over the last tenth of the iterations, must be within a stated distance of
that of the dense model, whose embeddings are untied where its own are. Mixture of Depths and early
exit are also compared at equal training FLOPs: with a dense model that trains for as many
iterations as their FLOPs buy, learning rate schedule and all.

    make test-convergence
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_dynmo.corpus import build_corpus
from scripts.dynamics_kinds import (
    CONVERGENCE_ITERATIONS,
    CONVERGENCE_MODEL,
    DENSE_TRIAL,
    DENSE_UNTIED_TRIAL,
    TRIALS,
    Trial,
)
from scripts.dynamics_runs import Run, train_traced
from scripts.results import ROOT, write_results
from tests.ranks import RanksFailed

COMMAND = "make test-convergence"
PAGE = ROOT / "docs" / "dynamics" / "convergence.md"
CURVES = PAGE.with_suffix(".png")
VOCABULARY = 512
TIMEOUT_S = 600  # a run
QUICK_ITERATIONS = 30
DENSE = (DENSE_TRIAL, DENSE_UNTIED_TRIAL)
SMOOTHED_OVER = 20  # iterations, in the picture only

console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True, eq=False)
class Learned:
    """One finished run.

    Attributes:
        iterations: trained.
        losses: of each iteration.
        flops: [iterations] training FLOPs spent until then, in iterations of the dense model.
    """

    iterations: int
    losses: list[float]
    flops: np.ndarray

    @classmethod
    def of(cls, run: Run, trial: Trial) -> Learned:
        """Read a run."""
        assert run.work is not None
        shares = shares_of_dense(run.work, trial)
        return cls(len(run.lm_loss), run.lm_loss, np.cumsum(shares))

    def save(self, path: Path, flags: Sequence[str]) -> None:
        """Keep it for `--resume`."""
        found = {"flags": list(flags), "losses": self.losses, "flops": self.flops.tolist()}
        path.write_text(json.dumps(found))

    @classmethod
    def kept(cls, path: Path, flags: Sequence[str]) -> Learned | None:
        """What was kept of a run with these flags; None if there is none."""
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        if found["flags"] != list(flags):
            return None
        return cls(len(found["losses"]), found["losses"], np.array(found["flops"]))

    @property
    def final_loss(self) -> float:
        """Mean over the last tenth."""
        return float(np.mean(self.losses[-max(self.iterations // 10, 1) :]))


def main() -> int:
    """Train all, compare, show, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [trial.name for trial in TRIALS]
    parser.add_argument("--only", action="append", choices=names, metavar="KIND")
    parser.add_argument("--quick", action="store_true", help="few iterations; writes no file")
    parser.add_argument("--resume", action="store_true", help="train only what is not there yet")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "convergence")
    args = parser.parse_args()
    iterations = QUICK_ITERATIONS if args.quick else CONVERGENCE_ITERATIONS
    corpus, _ = build_corpus(args.folder / "corpus", vocab_size=VOCABULARY)
    chosen = [trial for trial in TRIALS if not args.only or trial.name in args.only]

    os.environ.setdefault("PYTHONWARNINGS", "ignore")

    def learn(trial: Trial, count: int) -> Learned | None:
        folder = args.folder / f"{trial.name.replace(' ', '-')}-{count}"
        flags, file = words(trial, count, corpus), folder / "learned.json"
        if args.resume and (kept := Learned.kept(file, flags)) is not None:
            return kept
        shutil.rmtree(folder, ignore_errors=True)
        try:
            run = train_traced(folder, flags, timeout_s=TIMEOUT_S)
        except RanksFailed as error:  # the other runs are still worth their minutes
            console.print(f"[red]{trial.name} failed[/red]")
            console.print(str(error), markup=False, highlight=False)
            return None
        learned = Learned.of(run, trial)
        learned.save(file, flags)
        return learned

    needed = [t for t in DENSE if any(t.base == trial.base for trial in chosen)]
    with ThreadPoolExecutor(args.jobs) as pool, console.status("training"):
        everything = [*needed, *chosen]
        runs = list(pool.map(lambda trial: learn(trial, iterations), everything))
        learned = {t: run for t, run in zip(everything, runs, strict=True) if run is not None}
        dense = {t.base: learned.pop(t) for t in needed if t in learned}
        learned = {t: run for t, run in learned.items() if t.base in dense}
        bought = {t: round(run.flops[-1]) for t, run in learned.items() if t.equal_flops}
        found = pool.map(lambda t: learn(DENSE_TRIAL, bought[t]), bought)
        short = {t: run for t, run in zip(bought, found, strict=True) if run is not None}
    cells = [cell_of(t, run, dense[t.base], short.get(t)) for t, run in learned.items()]
    show(cells)
    has_failed = len(learned) < len(chosen) or len(short) < len(bought)
    if not args.quick and not args.only and not has_failed:
        path = write_results("convergence", "real", COMMAND, cells)
        draw(CURVES, {t.name: dense[t.base] for t in needed}, learned, short)
        PAGE.write_text(page(cells))
        console.print(f"written to {path}, {PAGE} and {CURVES}")
    # A quick run is too short to have converged.
    return has_failed or not (args.quick or all(cell["is_within"] for cell in cells))


def words(trial: Trial, iterations: int, corpus: Any) -> tuple[str, ...]:
    """Flags of a run."""
    return (
        *CONVERGENCE_MODEL,
        *trial.base,
        *trial.model,
        *corpus.megatron_args,
        *("--train-iters", str(iterations), "--lr-decay-iters", str(iterations)),
        *trial.flags(iterations),
    )


def shares_of_dense(work: np.ndarray, trial: Trial) -> np.ndarray:
    """[iterations] training FLOPs of an iteration over the dense model's.

    Args:
        work: [iterations, layers, 2] of forward and backward over those of the untouched layer, of
            which the latter counts twice.
        trial: whose model it is.
    """
    dense, untouched = flops_of_layer(()), flops_of_layer(trial.model)
    output = 2 * _number("--hidden-size", ()) * VOCABULARY
    num_layers = work.shape[1]
    layers = (work[:, :, 0] + 2 * work[:, :, 1]).sum(axis=1) / 3
    return (untouched * layers + output) / (dense * num_layers + output)


def flops_of_layer(model: Sequence[str]) -> int:
    """Forward FLOPs of a token in an untouched layer; a token of an MoE layer sees top-k MLPs.

    Args:
        model: flags beside CONVERGENCE_MODEL.
    """
    hidden, ffn, seq = (
        _number(name, model) for name in ("--hidden-size", "--ffn-hidden-size", "--seq-length")
    )
    experts, topk = (_number(name, model) for name in ("--num-experts", "--moe-router-topk"))
    mlp = (2 * topk * ffn + experts) if experts else 2 * ffn
    return 2 * (4 * hidden * hidden + hidden * mlp) + 4 * seq * hidden


def _number(name: str, model: Sequence[str]) -> int:
    """The last value of a flag; 0 where it is not given."""
    words = [*CONVERGENCE_MODEL, *model]
    places = [i for i, word in enumerate(words) if word == name]
    return int(words[places[-1] + 1]) if places else 0


def cell_of(trial: Trial, run: Learned, dense: Learned, short: Learned | None) -> dict[str, Any]:
    """A row of the table."""
    distance = run.final_loss - dense.final_loss
    cell = {
        "dynamic": trial.name,
        "flags": " ".join((*trial.base, *trial.model, *trial.flags(run.iterations))),
        "iterations": run.iterations,
        "final_loss": run.final_loss,
        "dense_loss": dense.final_loss,
        "distance": distance,
        "allowed_distance": trial.distance,
        "is_within": distance <= trial.distance,
        "flops_of_dense": float(run.flops[-1] / dense.flops[-1]),
        "note": trial.note,
    }
    if short is not None:
        cell["equal_flops"] = {
            "dense_iterations": short.iterations,
            "dense_loss": short.final_loss,
            "distance": run.final_loss - short.final_loss,
        }
    return cell


def show(cells: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="final loss")
    table.add_column("dynamic")
    for name in ("loss", "dense", "above", "allowed", "FLOPs of dense", "dense at equal FLOPs", ""):
        table.add_column(name, justify="right")
    for cell in cells:
        equal = cell.get("equal_flops")
        table.add_row(
            cell["dynamic"],
            f"{cell['final_loss']:.3f}",
            f"{cell['dense_loss']:.3f}",
            f"{cell['distance']:+.3f}",
            f"{cell['allowed_distance']:.2f}",
            f"{cell['flops_of_dense']:.0%}",
            f"{equal['dense_loss']:.3f} after {equal['dense_iterations']}" if equal else "",
            "[green]converges[/green]" if cell["is_within"] else "[red]too far[/red]",
        )
    console.print(table)


def page(cells: Sequence[dict[str, Any]]) -> str:
    """The document: what was done, the table and the picture."""
    lines = [
        "# Convergence",
        "",
        f"Written by `{COMMAND}`. Each kind trains the same small GPT on the same text, the",
        f"sources of Python's standard library, for {cells[0]['iterations']} iterations on one",
        "rank. The final loss is the mean over the last tenth of the iterations, and so is that",
        "of the dense model, which has untied embeddings where the dynamic's model has. FLOPs are",
        "those of training, over the dense model's; the last column is a dense model that trains",
        "for as many iterations as those FLOPs buy, learning rate schedule and all.",
        "",
        "| dynamic | final loss | dense | above | allowed | FLOPs | dense at equal FLOPs |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        equal = cell.get("equal_flops")
        text = f"{equal['dense_loss']:.3f} ({equal['dense_iterations']})" if equal else ""
        lines.append(
            f"| {cell['dynamic']} | {cell['final_loss']:.3f} | {cell['dense_loss']:.3f} "
            f"| {cell['distance']:+.3f} | {cell['allowed_distance']:.2f} "
            f"| {cell['flops_of_dense']:.0%} | {text} |"
        )
    lines += ["", f"![loss curves, over iterations and at equal FLOPs]({CURVES.name})", ""]
    for cell in cells:
        note = f" {cell['note']}" if cell["note"] else ""
        lines.append(f"- {cell['dynamic']}: `{cell['flags']}`.{note}")
    return "\n".join([*lines, ""])


def draw(
    path: Path,
    dense: dict[str, Learned],
    learned: dict[Trial, Learned],
    short: dict[Trial, Learned],
) -> None:
    """Draw the losses over iterations, and at equal FLOPs."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    left.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)  # more runs than colours otherwise
    for name, run in [*dense.items(), *((t.name, run) for t, run in learned.items())]:
        left.plot(*_smooth(np.arange(1.0, run.iterations + 1), run), label=name, linewidth=1)
    tied = dense[DENSE_TRIAL.name]
    right.plot(*_smooth(tied.flops, tied), label=DENSE_TRIAL.name, linewidth=1)
    for trial, run in short.items():
        (line,) = right.plot(
            *_smooth(learned[trial].flops, learned[trial]), label=trial.name, linewidth=1
        )
        right.plot(
            *_smooth(run.flops, run), label=f"dense, FLOPs of {trial.name}", linewidth=1,
            linestyle="--", color=line.get_color(),
        )  # fmt: skip
    left.set(xlabel="iteration", ylabel=f"loss, mean of {SMOOTHED_OVER} iterations")
    right.set(xlabel="training FLOPs, in iterations of the dense model")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})


def _smooth(x: np.ndarray, run: Learned) -> tuple[np.ndarray, np.ndarray]:
    """Points of a curve."""
    window = np.ones(SMOOTHED_OVER) / SMOOTHED_OVER
    return x[SMOOTHED_OVER - 1 :], np.convolve(run.losses, window, mode="valid")


if __name__ == "__main__":
    sys.exit(main())

"""What moving layers brings for each kind of dynamic: real on two cores, emulated on eight ranks.

Each kind trains the same model on the same text with the start layout kept ("static": Megatron's
default split, nothing moves), with the best layout that a run without moves could have had, known
in hindsight from what the static run recorded, and with megatron_dynmo left to itself. Best static
starts as the others do and changes its layout once, before the first iteration that counts: so all
three train the same weights, and their losses must be equal to the last bit. Where the default
split is the best one, its run is both.

Real: two ranks pinned to two cores, interleaved rounds, medians; and, because a machine's speed
drifts from run to run, one run more that goes to and fro between the start layout and the better
one where the dynamic ends. Emulated: real training, decisions and moves of eight pipeline ranks in
virtual time (docs/emulation.md), where a layer costs what the state of its dynamic says.

    make bench-dynamics
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_dynmo.corpus import build_corpus
from megatron_dynmo.emulate.emulation_file import emulation_from_json
from megatron_dynmo.simulate.baselines import best_static
from megatron_dynmo.simulate.pipeline import Case, Pipeline
from scripts import dynamics_kinds as kinds
from scripts.dynamics_kinds import Kind
from scripts.dynamics_limits import Limits, limits_of
from scripts.dynamics_runs import Run, emulated_trace, recorded_trace, train_emulated, train_real
from scripts.dynamics_tables import show, show_levels
from scripts.results import FOLDER, ROOT, machine, write_results
from tests.ranks import RanksFailed

COMMAND = "make bench-dynamics"
TIMEOUT_S = 900  # a run
QUICK_ITERATIONS = 12
QUICK_MICROBATCHES = {"real": 2, "emulated": 8}
SNAPSHOTS = 5
# Of the run that goes to and fro: an even number of blocks, and the iterations of each.
BLOCKS, BLOCK_ITERATIONS = 12, 5

# Wide enough for the tables where the output is no terminal.
console = Console(width=None if sys.stdout.isatty() else 130)


def main() -> int:
    """Run what is asked for, show it and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    known = {kind.name: kind for kind in (*kinds.KINDS, kinds.DENSE)}
    parser.add_argument("--only", action="append", choices=list(known), metavar="KIND")
    parser.add_argument("--block", action="append", choices=["real", "emulated"])
    parser.add_argument("--rounds", type=int, default=2, help="interleaved rounds of real runs")
    parser.add_argument("--quick", action="store_true", help="few iterations; writes no file")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-dynamics")
    args = parser.parse_args()
    chosen = [known[name] for name in args.only] if args.only else kinds.KINDS
    blocks = args.block or ["real", "emulated"]
    corpus, _ = build_corpus(args.folder / "corpus", vocab_size=512)
    console.print(f"corpus: {corpus.tokens / 1e6:.1f} M tokens, vocabulary {corpus.vocab_size}")
    # Megatron's modules warn of what is not installed; read when the server of the ranks starts.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    writes = not args.quick and kinds.DENSE not in chosen
    cells: list[dict[str, Any]] = []
    failed: list[str] = []
    for block in blocks:
        for kind in chosen:
            folder = args.folder / block / kind.name.replace(" ", "-")
            shutil.rmtree(folder, ignore_errors=True)
            bench = (Real if block == "real" else Emulated)(
                kind, folder, tuple(corpus.megatron_args), args.quick
            )
            try:
                cells.append(bench.cell(1 if args.quick else args.rounds))
            except RanksFailed as error:
                # The other kinds are still worth their minutes.
                failed.append(f"{block} {kind.name}")
                console.print(f"[red]{failed[-1]} failed[/red]; {folder} has the ranks' output")
                console.print(str(error), markup=False, highlight=False)
                continue
            show_levels(console, cells[-1])
            if writes:
                write_results("dynamics", "real", COMMAND, merged(cells))
    for block in blocks:
        show(console, block, [cell for cell in cells if cell["kind"] == block])
    wrong = [cell for cell in cells if not _is_equal(cell)]
    for cell in wrong:
        console.print(f"[red]{cell['kind']} {cell['dynamic']}: the runs differ[/red]")
    for name in failed:
        console.print(f"[red]{name}: failed[/red]")
    return bool(wrong or failed)


class Real:
    """One kind on two cores.

    Args:
        kind: the kind.
        folder: where its runs go.
        data: flags of the corpus.
        is_quick: whether only to see that it runs.
    """

    block = "real"
    model = kinds.REAL_MODEL
    iterations = kinds.REAL_ITERATIONS

    def __init__(self, kind: Kind, folder: Path, data: tuple[str, ...], is_quick: bool) -> None:
        self.kind, self.folder, self.data = kind, folder, data
        self.quick: tuple[str, ...] = ()
        if is_quick:
            self.iterations = QUICK_ITERATIONS
            self.quick = ("--global-batch-size", str(QUICK_MICROBATCHES[self.block]))

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the dynamic."""
        return self.kind.flags(self.iterations)

    @property
    def kind_model(self) -> tuple[str, ...]:
        """Flags of the model that this kind has."""
        return self.kind.real_model

    @property
    def note(self) -> str:
        """What to know of the row."""
        return self.kind.real_note

    @property
    def static_flags(self) -> tuple[str, ...]:
        """Under which nothing moves."""
        if self.flags:
            return ("--dynmo-mode", "observe")
        # Without a dynamic, observe would be stock Megatron, whose last bits are its own.
        return ("--dynmo-interval", str(self.iterations + 1), "--dynmo-min-gain-pct", "1e9")

    @property
    def words(self) -> tuple[str, ...]:
        """Flags of all runs but those that say how it is balanced."""
        return (
            *self.model,
            *self.kind_model,
            *self.quick,
            *self.data,
            *("--train-iters", str(self.iterations), "--lr-decay-iters", str(self.iterations)),
            *("--dynmo-digest-interval", str(self.iterations)),
            *self.flags,
        )

    def train(self, name: str, *flags: str) -> Run:
        """Train once."""
        with console.status(f"{self.block} {self.kind.name}: {name}"):
            return self._train(self.folder / name, *flags)

    def _train(self, folder: Path, *flags: str) -> Run:
        return train_real(folder, (*self.words, *flags), timeout_s=TIMEOUT_S)

    def case(self, static: Run) -> Case:
        """What layers cost in the static run, on its pipeline."""
        return Case(recorded_trace(static), pipeline_of(static))

    def limits(self, case: Case, static: Run) -> Limits:
        """What no policy can exceed on the trace; measured costs bring their noise along."""
        closed = case.iteration_ms(case.uniform, slice(None))
        # What the schedule does not explain: loading, the optimizer, what dynamics do after a step.
        rest_ms = max(static.mean_ms - float(closed.mean()), 0.0)
        rows = len(static.settled)
        times = {"mean": closed.mean(), "settled": np.median(closed[-rows:])}
        return limits_of(case, rest_ms, {k: float(ms) + rest_ms for k, ms in times.items()}, rows)

    def to_and_fro(self, start: str, other: str, static: Run) -> dict[str, Any] | None:
        """Compare two layouts where the dynamic ends, by turns in one run.

        Args:
            start: the layout that static keeps.
            other: the one that was moved to last, or else the best in hindsight.
            static: a static run, which this one must equal up to its last iteration.

        Returns:
            The other layout, how many times as fast it is (median over its neighbours in time), and
            whether the losses are equal; None where both are the same.
        """
        if other == start:
            return None
        first = [self.iterations + number * BLOCK_ITERATIONS for number in range(BLOCKS)]
        moves = [f"{at}:{(other, start)[k % 2]}" for k, at in enumerate(first)]
        run = self.train(
            "to-and-fro",
            *("--dynmo-force-layout", ";".join(moves)),
            *("--train-iters", str(self.iterations + BLOCKS * BLOCK_ITERATIONS)),
        )
        return {
            "layout": other,
            "speedup": speedup_by_turns(run.iteration_ms, first),
            "loss_equal": run.losses[: self.iterations] == static.losses,
        }

    def cell(self, rounds: int) -> dict[str, Any]:
        """Measure, and make a row of the table."""
        runs: dict[str, list[Run]] = {"static": [], "best_static": [], "dynmo": []}
        for number in range(1, rounds + 1):
            runs["static"].append(self.train(f"static-{number}", *self.static_flags))
            if number == 1:
                case = self.case(runs["static"][0])
                best, start = (
                    case.layout(split).to_megatron()
                    for split in (best_static(case, [case.uniform]), case.uniform)
                )
            if best == start:  # nothing to force: static is the best
                runs["best_static"].append(runs["static"][-1])
            else:
                move = ("--dynmo-force-layout", f"1:{best}")
                runs["best_static"].append(self.train(f"best-static-{number}", *move))
            runs["dynmo"].append(self.train(f"dynmo-{number}"))
        ms = {name: [run.mean_ms for run in rows] for name, rows in runs.items()}
        settled = {name: [run.settled_ms for run in rows] for name, rows in runs.items()}
        static = runs["static"][0]
        moves = [
            {"round": number} | {name: move[name] for name in ("iteration", "to", "duration_ms")}
            for number, run in enumerate(runs["dynmo"], 1)
            for move in run.of("migration")
        ]
        cell = {
            "kind": self.block,
            "dynamic": self.kind.name,
            "flags": " ".join(self.flags),
            "iterations": self.iterations,
            **{f"{name}_ms": statistics.median(values) for name, values in ms.items()},
            "speedup": _ratio(ms["static"], ms["dynmo"]),
            "ratio_to_best_static": _ratio(ms["dynmo"], ms["best_static"]),
            "settled_ms": {name: statistics.median(rows) for name, rows in settled.items()},
            "settled_speedup": _ratio(settled["static"], settled["dynmo"]),
            "loss_equal": _all_same([run.losses for rows in runs.values() for run in rows]),
            "digests_equal": _all_same([run.digest for rows in runs.values() for run in rows]),
            "paper_speedup": self.kind.paper_speedup,
            "static_layout": start,
            "best_static_layout": best,
            "moves": moves,
            "to_and_fro": self.to_and_fro(start, moves[-1]["to"] if moves else best, static),
            "rounds": rounds,
            "iteration_ms": {name: over_time(rows) for name, rows in runs.items()},
            "levels": levels(static),
        }
        return cell | self.limits(case, static).fields(cell) | {"note": self.note}


class Emulated(Real):
    """One kind on eight emulated ranks; see `Real`. Time is exact, so one round is enough."""

    block = "emulated"
    model = kinds.EMULATED_MODEL
    iterations = kinds.EMULATED_ITERATIONS
    document = kinds.EMULATION

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the dynamic."""
        return (self.kind.emulated_flags or self.kind.flags)(self.iterations)

    @property
    def kind_model(self) -> tuple[str, ...]:
        """See `Real.kind_model`."""
        return self.kind.emulated_model

    @property
    def note(self) -> str:
        """See `Real.note`."""
        return self.kind.emulated_note

    def _train(self, folder: Path, *flags: str) -> Run:
        return train_emulated(
            folder, (*self.words, *flags), self.document, ranks=kinds.EMULATED_RANKS,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip

    def case(self, static: Run) -> Case:
        """See `Real.case`; here the costs are exact."""
        pipeline = pipeline_of(static, emulation_from_json(self.document).link.hop_ms(0))
        return Case(emulated_trace(static, self.document), pipeline)

    def limits(self, case: Case, static: Run) -> Limits:
        """What no policy can exceed on this trace."""
        return limits_of(
            case,
            emulation_from_json(self.document).optimizer_ms.at(1),
            {"mean": static.mean_ms, "settled": static.settled_ms},
            len(static.settled),
        )

    def to_and_fro(self, start: str, other: str, static: Run) -> dict[str, Any] | None:
        """Not needed: virtual time does not drift."""
        return None

    def cell(self, rounds: int) -> dict[str, Any]:
        """See `Real.cell`."""
        return super().cell(1)


def over_time(runs: Sequence[Run]) -> list[float]:
    """Time of each step, from the first iteration on; medians over rounds."""
    rows = zip(*(run.iteration_ms.values() for run in runs), strict=True)
    return [round(statistics.median(row), 1) for row in rows]


def speedup_by_turns(iteration_ms: dict[int, float], first: Sequence[int]) -> float:
    """How many times as fast blocks 0, 2, 4 ... of a run are as the ones between them.

    Args:
        iteration_ms: {iteration: time}.
        first: the iteration before each block, an even number of blocks of one length; the first
            iteration of a block, just after a move, does not count.
    """
    length = first[1] - first[0]
    ms = [statistics.median(iteration_ms[at + k] for k in range(2, length + 1)) for at in first]
    # Each slow block against the mean of the fast ones around it.
    around = [ms[k - 1 : k + 2 : 2] for k in range(1, len(ms), 2)]
    return statistics.median(
        slow / statistics.mean(fast) for slow, fast in zip(ms[1::2], around, strict=True)
    )


def pipeline_of(run: Run, p2p_ms: float = 0.0) -> Pipeline:
    """The pipeline that a run was trained on."""
    profile = run.of("profile")[-1]
    num_stages, virtual_stages = (
        len({stage[name] for stage in profile["stages"]}) for name in ("pp_rank", "vp_stage")
    )
    return Pipeline(
        num_stages,
        profile["num_microbatches"],
        schedule="1f1b" if virtual_stages == 1 else "interleaved",
        virtual_stages=virtual_stages,
        p2p_ms=p2p_ms,
    )


def levels(run: Run) -> list[dict[str, Any]]:
    """Time of every layer at a few moments of a run, beside the state of the dynamic."""
    profiles, changes = run.of("profile"), run.of("dynamics")
    count = min(SNAPSHOTS, len(profiles))
    picked = [profiles[round(k * (len(profiles) - 1) / max(count - 1, 1))] for k in range(count)]
    rows = []
    for profile in picked:
        before = [e for e in changes if e["iteration"] < profile["iteration"]]
        left_out = ("iteration", "event", "time_s", "emulated")
        state = {k: v for k, v in before[-1].items() if k not in left_out} if before else {}
        rows.append(
            {
                "iteration": profile["iteration"],
                "state": state,
                "forward_ms": [layer["forward_ms"] for layer in profile["layers"]],
                "backward_ms": [layer["backward_ms"] for layer in profile["layers"]],
            }
        )
    return rows


def merged(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows, and those of the file that were not measured again on the same machine."""
    path = FOLDER / "dynamics.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    before = document["cells"] if document.get("machine") == machine() else []
    rows = {(cell["kind"], cell["dynamic"]): cell for cell in (*before, *cells)}
    order = [
        (block, kind.name) for block in ("real", "emulated") for kind in kinds.KINDS
    ]  # others are of kinds that there are no more
    return [rows[key] for key in order if key in rows]


def _is_equal(cell: dict[str, Any]) -> bool:
    """Whether all runs of a row trained the same."""
    turns = cell["to_and_fro"]
    return cell["loss_equal"] and cell["digests_equal"] and (turns is None or turns["loss_equal"])


def _ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median over interleaved rounds."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _all_same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


if __name__ == "__main__":
    sys.exit(main())

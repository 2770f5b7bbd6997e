"""The demonstration: real text, real Megatron, two pipeline stages, and a layer that moves.

Trains the same small GPT on the same text three ways, interleaved: stock Megatron with its default
split, megatron_dynmo told to keep that split, and megatron_dynmo left to itself. Prints what each
iteration took, where the layers went, and whether parameters and moments ended up equal.

    make demo
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_dynmo.corpus import build_corpus
from megatron_dynmo.telemetry.events import read_events
from scripts.results import ROOT, write_results

NUM_LAYERS = 8
MODEL = f"""
    --num-layers {NUM_LAYERS} --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 2
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --clip-grad 1.0 --split 98,1,1
    --eval-iters 0 --eval-interval 100000 --log-interval 1 --num-workers 0
""".split()
EVEN = "Et*4|t*4L"
_ELAPSED = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")

console = Console()


@dataclass
class Run:
    """One finished run.

    Attributes:
        iteration_ms: {iteration: time}, as Megatron's own log lines say.
        events: what megatron_dynmo wrote; empty for stock Megatron.
    """

    iteration_ms: dict[int, float]
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]


def main() -> int:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2, help="interleaved repetitions")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "demo")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    corpus, _ = build_corpus(args.folder / "corpus", vocab_size=16384)
    console.print(
        f"corpus: {corpus.documents} files of the Python standard library, "
        f"{corpus.tokens / 1e6:.1f} M tokens, vocabulary {corpus.vocab_size}"
    )
    hold = ["--dynmo-force-layout", f"{args.iterations + 1}:{EVEN}"]
    ways = {"stock": ["--dynmo-mode", "off"], "held": hold, "balanced": []}
    rounds: list[dict[str, Run]] = []
    for number in range(1, args.rounds + 1):
        rounds.append({})
        for name, flags in ways.items():
            with console.status(f"round {number} of {args.rounds}: {name}"):
                folder = args.folder / f"{number}-{name}"
                rounds[-1][name] = train(folder, corpus.megatron_args, args.iterations, flags)
    return report(rounds, args.folder)


def train(folder: Path, data: list[str], iterations: int, flags: list[str]) -> Run:
    """Train once in two processes, each pinned to a core of its own."""
    folder.mkdir(parents=True)
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(ROOT / "scripts" / "pinned_pretrain.py"),
        *MODEL,
        *data,
        *("--train-iters", str(iterations), "--lr-decay-iters", str(iterations)),
        *flags,
    ]
    if "off" not in flags:
        argv += ["--dynmo-log-dir", str(folder), "--dynmo-digest-interval", str(iterations)]
    log = folder / "output.txt"
    with log.open("w") as output:
        status = subprocess.run(
            argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
    text = log.read_text()
    if status:
        sys.exit(f"training failed with status {status}; its output is in {log}\n{text[-3000:]}")
    events = folder / "events.jsonl"
    return Run(
        {int(number): float(ms) for number, ms in _ELAPSED.findall(text)},
        read_events(events) if events.exists() else [],
    )


def report(rounds: list[dict[str, Run]], folder: Path) -> int:
    """Print the table, write the figures, and fail if anything is not as promised."""
    moved = [r["balanced"].of("migration") for r in rounds]
    if not all(moved):
        console.print("[red]the balanced run did not move a layer[/red]; reasons:")
        for event in rounds[-1]["balanced"].of("decision"):
            console.print(f"  iteration {event['iteration']}: {event['reason']}")
        return 1
    # Times are compared over the same iterations, once the last move of any round is behind.
    settled = max(m[-1]["iteration"] for m in moved) + 2
    median = {
        name: [
            statistics.median(ms for i, ms in r[name].iteration_ms.items() if i >= settled)
            for r in rounds
        ]
        for name in rounds[0]
    }
    ratios = {
        name: statistics.median(
            a / b for a, b in zip(median[name], median["balanced"], strict=True)
        )
        for name in ("stock", "held")
    }
    equal = all(
        _final_digest(r["held"]) == _final_digest(r["balanced"])
        and _losses(r["held"]) == _losses(r["balanced"])
        for r in rounds
    )
    after = moved[0][-1]["to"]
    table = Table(title=f"median ms an iteration, from iteration {settled} (real, 2 cores)")
    for column in ("round", "stock Megatron", "split kept", "balanced", "stock / balanced"):
        table.add_column(column, justify="right")
    for number, row in enumerate(zip(*median.values(), strict=True), 1):
        table.add_row(str(number), *(f"{ms:.0f}" for ms in row), f"{row[0] / row[2]:.3f}")
    console.print(table)
    first = moved[0][0]
    console.print(f"layout before: {first['from']}   after: {after}")
    console.print(
        f"moved layers {first['layers_moved']} after iteration {first['iteration']}: "
        f"{first['bytes'] / 1e6:.1f} MB in {first['duration_ms']:.0f} ms"
    )
    console.print(
        f"speed-up over stock Megatron: {ratios['stock']:.3f}, over the split kept: "
        f"{ratios['held']:.3f} (medians of interleaved pairs)"
    )
    verdict = "[green]equal[/green]" if equal else "[red]DIFFERENT[/red]"
    console.print(f"losses and final digests of 'split kept' and 'balanced': {verdict}")
    console.print(f"logs: {folder}")
    cell = {
        "static_ms": statistics.median(median["stock"]),
        "held_ms": statistics.median(median["held"]),
        "dynmo_ms": statistics.median(median["balanced"]),
        "speedup": ratios["stock"],
        "speedup_over_held": ratios["held"],
        "layout_before": first["from"],
        "layout_after": after,
        "digests_equal": equal,
        "rounds": len(rounds),
    }
    write_results("demo", "real", "make demo", [cell])
    return 0 if equal else 1


def _final_digest(run: Run) -> dict[str, Any]:
    last = run.of("digest")[-1]
    return {key: last[key] for key in ("iteration", "layers", "embedding", "output")}


def _losses(run: Run) -> list[str]:
    return [event["lm_loss_hex"] for event in run.of("iteration")]


if __name__ == "__main__":
    sys.exit(main())

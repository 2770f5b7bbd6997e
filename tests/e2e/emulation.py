"""Runs of a tiny GPT on emulated devices: the drop-in with `--dynmo-emulate`, and its events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.telemetry.events import read_events
from tests.e2e.training import TINY_GPT
from tests.ranks import run_ranks

# Real compute is as small as Megatron allows: virtual time does not depend on it.
TINIEST = (
    "--hidden-size 8 --ffn-hidden-size 8 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --vocab-size 15"
).split()
MESSAGE_BYTES = 8 * 8 * 4  # sequence x hidden x float32, one sample


def drop_in(rank: int, world_size: int, *argv: str) -> None:
    """Be one rank of the drop-in."""
    from megatron_dynmo import pretrain_gpt

    pretrain_gpt.main(list(argv))


def run_emulated(
    folder: Path,
    document: dict[str, Any],
    layout: str,
    *flags: str,
    num_stages: int,
    num_layers: int,
    num_microbatches: int,
    iterations: int,
    is_emulated: bool = True,
    timeout_s: float = 120.0,
) -> list[dict[str, Any]]:
    """Train on emulated devices and return the events.

    Args:
        folder: where the emulation file, the ranks' output and the events go.
        document: the emulation.
        layout: Megatron layout string at the start.
        flags: Megatron's and ours, after all others.
        num_stages: pipeline ranks.
        num_layers: decoder layers.
        num_microbatches: of an iteration.
        iterations: to train.
        is_emulated: whether on emulated devices; else the same run in real time.
        timeout_s: when to give up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "emulation.json"
    file.write_text(json.dumps(document))
    run_ranks(
        drop_in,
        num_stages,
        *TINY_GPT,
        *TINIEST,
        *("--num-layers", str(num_layers), "--global-batch-size", str(num_microbatches)),
        *("--train-iters", str(iterations), "--lr-decay-iters", str(max(iterations, 8))),
        *("--pipeline-model-parallel-size", str(num_stages)),
        *("--pipeline-model-parallel-layout", layout),
        *("--dynmo-log-dir", str(folder)),
        *(("--dynmo-emulate", str(file)) if is_emulated else ()),
        *flags,
        timeout_s=timeout_s,
        log_dir=folder / "ranks",
    )
    return read_events(folder / EVENTS_FILE)


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind, in order."""
    return [event for event in events if event["event"] == kind]

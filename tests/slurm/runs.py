"""The runs that give nodes back: one whose load collapses, one that needs them again."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.training import TINY_GPT

FREEZE_AT = 8
# Six of eight layers freeze, on devices of which only time is virtual, so that the decision is
# always the same. The output layer takes as long as two others. The busiest of four stages takes 90
# ms of a micro-batch before the freeze, of three 120, of two 150; after it, when a frozen layer
# takes a third, 90 of four and of two.
_DEVICES = {
    "num_layers": 8,
    "every_layer": {"forward_ms": 10.0, "backward_ms": 20.0, "memory_bytes": 1_000_000},
    "last_stage_extra": {"forward_ms": 20.0, "backward_ms": 40.0},
    "migration": {"bandwidth_gb_s": 25, "rebuild_ms": 1},
}


def collapsing(folder: Path, name: str) -> list[str]:
    """Words of a run for which two of four stages suffice; its events go to `folder/name`."""
    file = folder / "devices.json"
    file.write_text(json.dumps(_DEVICES))
    return [
        *TINY_GPT, "--num-layers", "8", "--pipeline-model-parallel-size", "4",
        "--train-iters", "1000", "--lr-decay-iters", "1000",
        "--untie-embeddings-and-output-weights",
        "--dynmo-freeze", "schedule", "--dynmo-freeze-schedule", f"{FREEZE_AT}:6",
        "--dynmo-emulate", str(file), "--dynmo-log-dir", str(folder / name),
    ]  # fmt: skip


def growing(folder: Path, name: str) -> list[str]:
    """Words of a run on four stages that makes the same checkpoints at any size."""
    return [
        *TINY_GPT, "--pipeline-model-parallel-size", "4", "--bf16",
        "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable",
        "--train-iters", "12", "--lr-decay-iters", "12",
        "--dynmo-digest-interval", "1", "--dynmo-log-dir", str(folder / name),
    ]  # fmt: skip


def restarting(folder: Path, name: str) -> list[str]:
    """The same, given back two nodes after iteration 2 and needing them after iteration 6."""
    saved = str(folder / f"{name}-saved")
    return [
        *growing(folder, name), "--save", saved, "--load", saved, "--save-interval", "100",
        "--dynmo-release", "restart", "--dynmo-force-pack", "2:2;6:4",
    ]  # fmt: skip

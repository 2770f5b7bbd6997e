"""A checkpoint saved after a move: resumed by us or by stock Megatron, the run goes on."""

import pytest

from tests.e2e.moving import train_ours
from tests.e2e.parity import read_trace
from tests.e2e.training import train
from tests.ranks import run_ranks

# Clipping never strikes, so that stock Megatron's rounding of the norm does not matter.
COMMON = "--pipeline-model-parallel-size 2 --clip-grad 100 --train-iters 6".split()
CELLS = {
    "fp32": (),
    "bf16, distributed optimizer": ("--bf16", "--use-distributed-optimizer"),
    "one file a rank": ("--ckpt-format", "torch"),
}
SLOW = ("bf16, distributed optimizer", "one file a rank")


def ours(folder, *flags):
    logs = ("--dynmo-log-dir", str(folder), "--dynmo-digest-interval", "1")
    run_ranks(train_ours, 2, None, None, *COMMON, *flags, *logs)
    return read_trace(folder)


@pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=[pytest.mark.matrix] * (c in SLOW)) for c in CELLS]
)
def test_a_run_resumed_after_a_move_equals_the_uninterrupted_one(cell, tmp_path):
    flags = CELLS[cell]
    saved = str(tmp_path / "checkpoints")
    whole = ours(
        tmp_path / "whole",
        *flags,
        *("--dynmo-force-layout", "2:E|ttttL;3:Ettt|tL", "--save", saved, "--save-interval", "4"),
    )
    assert len(whole.migrations) == 2 and sorted(whole.losses) == [1, 2, 3, 4, 5, 6]
    load = ("--load", saved, "--ckpt-step", "4", "--use-checkpoint-args")
    # No layout is given: it comes with the checkpoint, and the next move starts from it.
    resumed = ours(tmp_path / "resumed", *flags, *load, "--dynmo-force-layout", "5:Ett|ttL")
    assert [m["from"] for m in resumed.migrations] == ["Et*3|tL"]
    for iteration in (5, 6):
        assert resumed.losses[iteration] == whole.losses[iteration]
        assert resumed.grad_norms[iteration] == whole.grad_norms[iteration]
        assert resumed.digests[iteration] == whole.digests[iteration]
    assert sorted(resumed.losses) == [5, 6]
    if cell == "fp32":
        # Stock Megatron, at its default split.
        stock = run_ranks(train, 2, *COMMON, *load)
        assert [step["lm loss"] for step in stock[-1]["losses"]] == [
            whole.losses[5],
            whole.losses[6],
        ]

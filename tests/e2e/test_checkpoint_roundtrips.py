"""Checkpoints by parameter load in every mode, under every layout and number of stages.

The distributed optimizer's fully reshardable format is the one that does this. Parameters, masters
and moments are compared by digest and losses by their bits.
"""

import pytest

from tests.e2e.moving import train_ours
from tests.e2e.parity import read_trace
from tests.ranks import run_ranks

# Clipping never strikes, so that stock Megatron's rounding of the norm does not matter.
COMMON = "--clip-grad 100 --train-iters 6 --lr-decay-iters 6 --global-batch-size 8".split()
DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable".split()
MOE = "--num-experts 4 --moe-router-topk 2 --moe-layer-freq [0,1,1,1] --disable-bias-linear"
MODELS = {
    "bf16, tied": ["--bf16"],
    "MoE, fp32, untied": [*MOE.split(), "--untie-embeddings-and-output-weights"],
}
OBSERVE = ["--dynmo-mode", "observe"]


@pytest.fixture
def run(tmp_path):
    """Train on so many ranks and stages, the rest data-parallel, and return the trace."""

    def run(name, ranks, stages, *flags):
        folder = tmp_path / name
        run_ranks(
            train_ours,
            ranks,
            None,
            None,
            *(*COMMON, *DISTRIBUTED_OPTIMIZER, "--pipeline-model-parallel-size", str(stages)),
            *("--dynmo-log-dir", str(folder), "--dynmo-digest-interval", "1"),
            *flags,
            timeout_s=280,
        )
        return read_trace(folder)

    return run


def go_on_alike(resumed, whole, iterations):
    """Whether the resumed run did what the uninterrupted one did, bit for bit."""
    assert sorted(resumed.losses) == iterations
    for iteration in iterations:
        assert resumed.digests[iteration] == whole.digests[iteration]
        assert resumed.losses[iteration] == whole.losses[iteration]


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["bf16, tied", "MoE, fp32, untied"])
def test_a_checkpoint_after_moves_loads_without_us_and_comes_back(model, run, tmp_path):
    flags, saved = MODELS[model], tmp_path / "saved"
    save = ("--save", str(saved), "--save-interval", "2")
    force = "--dynmo-force-layout"
    whole = run("whole", 4, 2, *flags, force, "1:E|ttttL;3:Ettt|tL;5:Et|tttL", *save)
    assert len(whole.migrations) == 3
    # Megatron's own split and buckets.
    plain = run(
        "plain", 4, 2, *flags, *OBSERVE, "--load", str(saved), "--ckpt-step", "2",
        "--pipeline-model-parallel-layout", "Ett|ttL", "--save", str(tmp_path / "plain-saved"),
        "--save-interval", "4",
    )  # fmt: skip
    go_on_alike(plain, whole, [3, 4, 5, 6])
    # What that saved loads here again, and layers move on.
    back = run("back", 4, 2, *flags, "--load", str(tmp_path / "plain-saved"), "--ckpt-step", "4",
               force, "5:Ettt|tL")  # fmt: skip
    assert [m["from"] for m in back.migrations] == ["Ett|ttL"]
    go_on_alike(back, whole, [5, 6])


@pytest.mark.matrix
@pytest.mark.parametrize("model", MODELS)
def test_other_numbers_of_stages(model, run, tmp_path):
    flags, force = MODELS[model], "--dynmo-force-layout"
    first, second = tmp_path / "first", tmp_path / "second"
    whole = run("whole", 2, 2, *flags, force, "1:Et|tttL", "--save", str(first),
                "--save-interval", "2")  # fmt: skip
    wider = run(
        "wider", 4, 4, *flags, "--load", str(first), "--ckpt-step", "2", force, "3:Ett|t||tL",
        "--save", str(second), "--save-interval", "4",
    )  # fmt: skip
    go_on_alike(wider, whole, [3, 4, 5, 6])
    narrow = run(
        "narrow", 2, 2, *flags, "--load", str(second), "--ckpt-step", "4", force, "5:Ettt|tL"
    )
    go_on_alike(narrow, whole, [5, 6])

"""Dropout by layer and micro-batch: real Megatron, dropout 0.1, the same bits for every layout."""

import contextlib
from pathlib import Path

import pytest

from tests.e2e.training import exact, train
from tests.ranks import run_ranks

DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
PP2 = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout")
FULL = ("--recompute-granularity", "full", "--recompute-num-layers")


def train_with_layer_rng(rank, world_size, *argv):
    """Train with dropout by layer, as a controller would arrange it.

    Returns:
        By iteration: `losses` and `grad_norms` as `train` gives them, and in `untouched` whether
        the streams outside of the model stayed where they were.
    """
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.training import training
    from megatron.training.global_vars import get_args

    from megatron_dynmo.adapters.layer_rng import LayerRng
    from megatron_dynmo.patches import numerics
    from megatron_dynmo.patching import patched

    train_step = training.train_step
    rng = None
    seen = {"losses": [], "grad_norms": [], "untouched": []}

    def seeded_step(*args, **kwargs):
        nonlocal rng
        if rng is None:
            rng = LayerRng(seed=get_args().seed)
            rng.attach(args[2])
        rng.begin_iteration(kwargs["iteration"])
        before = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        result = train_step(*args, **kwargs)
        after = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        seen["losses"].append({name: exact(value) for name, value in result[0].items()})
        seen["grad_norms"].append(exact(result[5]))
        seen["untouched"].append(
            torch.equal(before[0], after[0])
            and all(torch.equal(before[1][name], after[1][name]) for name in before[1])
        )
        return result

    training.train_step = seeded_step
    # --exit-interval ends a run early by leaving the process.
    with patched(numerics.specs()), contextlib.suppress(SystemExit):
        train(rank, world_size, *argv)
    return seen


def numbers(results):
    """Return the losses and gradient norms of a run, by iteration."""
    return list(zip(results[-1]["losses"], results[-1]["grad_norms"], strict=True))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A checkpoint after one iteration, so that every layout can start from the same weights."""
    folder = str(tmp_path_factory.mktemp("start"))
    run_ranks(
        train_with_layer_rng, 2, *DROPOUT, *PP2, "Et|tttL",
        "--save", folder, "--save-interval", "1", "--exit-interval", "1",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def run(start):
    """Continue from the checkpoint for three iterations with more words; runs are kept."""
    kept = {}

    def run(*words, world_size=2, fn=train_with_layer_rng):
        key = (fn.__name__, world_size, *words)
        if key not in kept:
            kept[key] = run_ranks(fn, world_size, *DROPOUT, "--load", start, *words)
        return kept[key]

    return run


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            (*PP2, "Ettt|tL", *FULL, "2", "--recompute-method", "uniform"),
            marks=pytest.mark.matrix,
        ),
        (*PP2, "Et|t|t|tL"),  # two virtual stages
        pytest.param((*PP2, "Ettt|tL"), marks=pytest.mark.matrix),
        pytest.param((*PP2, "E|ttttL"), marks=pytest.mark.matrix),
        pytest.param(
            (*PP2, "Et|tttL", *FULL, "1", "--recompute-method", "uniform"),
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            (*PP2, "Et|tttL", *FULL, "1", "--recompute-method", "block"), marks=pytest.mark.matrix
        ),
        pytest.param(
            (*PP2, "Et|tttL", "--recompute-granularity", "selective"), marks=pytest.mark.matrix
        ),
    ],
    ids=lambda words: "_".join(words[3:]),
)
def test_dropout_is_the_same_for_every_layout_and_recompute(run, words):
    reference = run(*PP2, "Et|tttL")
    assert len(numbers(reference)) == 3
    assert numbers(run(*words)) == numbers(reference)


@pytest.mark.matrix
def test_without_it_the_layout_changes_dropout(run):
    one, other = (run(*PP2, layout, fn=train) for layout in ("Et|tttL", "Ettt|tL"))
    assert numbers(one)[0] != numbers(other)[0]


def test_each_iteration_and_micro_batch_drops_something_else(run):
    losses = [loss["lm loss"] for loss, _ in numbers(run(*PP2, "Et|tttL"))]
    assert len(set(losses)) == 3


def test_streams_outside_of_the_model_are_left_alone(run):
    for rank in run(*PP2, "Et|tttL"):
        assert rank["untouched"] == [True] * 3


@pytest.mark.matrix
def test_a_resumed_run_drops_what_the_unbroken_one_drops(run, start, tmp_path):
    folder = str(tmp_path / "later")
    first = run(*PP2, "Et|tttL", "--save", folder, "--save-interval", "2", "--exit-interval", "2")
    assert Path(folder, "iter_0000002").is_dir()
    rest = run(*PP2, "Ettt|tL", "--load", folder)
    assert numbers(first) + numbers(rest) == numbers(run(*PP2, "Et|tttL"))

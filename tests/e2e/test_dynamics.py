"""The conformance suite of all dynamics: exact under moves, exact over a resume."""

import sys

import pytest

from tests.e2e.conformance import CASES, SETTINGS, cell_of
from tests.e2e.moving import train_ours
from tests.e2e.parity import compare, read_trace
from tests.e2e.training import TINY_GPT, _pretrain, exact
from tests.ranks import run_ranks

PAIRS = [
    pytest.param(
        case,
        setting,
        id=f"{case.name}; {setting.name}",
        marks=[] if case.in_ci and setting.in_ci else [pytest.mark.matrix],
    )
    for case in CASES
    for setting in SETTINGS
]
# CI evaluates one whose threshold changes.
EVALUATED = [
    pytest.param(case, id=case.name, marks=[] if "saturation" in case.name else pytest.mark.matrix)
    for case in CASES
]


@pytest.mark.parametrize(("case", "setting"), PAIRS)
def test_moves_in_the_midst_of_a_dynamic_change_nothing(case, setting, tmp_path):
    row = compare(cell_of(case, setting), tmp_path)
    assert row["loss_equal"] and row["digests_equal"], row


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", [(), ("--use-distributed-optimizer",)], ids=["", "sharded"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_resumed_in_the_midst_of_a_dynamic_equals_the_uninterrupted_one(
    case, optimizer, tmp_path
):
    cell = cell_of(case, SETTINGS[0])
    saved = str(tmp_path / "checkpoints")

    def train(folder, *flags):
        run_ranks(
            *(train_ours, 2, None, None, *cell.flags, *optimizer, *flags),
            *("--train-iters", "8", "--lr-decay-iters", "8", "--clip-grad", "1.0"),
            *("--dynmo-log-dir", str(folder), "--dynmo-digest-interval", "1"),
            timeout_s=240,
        )
        return read_trace(folder)

    whole = train(
        tmp_path / "whole",
        *("--dynmo-force-layout", "3:Ettt|tL;6:Et|tttL", "--save", saved, "--save-interval", "4"),
    )
    load = ("--load", saved, "--ckpt-step", "4")
    resumed = train(tmp_path / "resumed", *load, "--dynmo-force-layout", "5:E|ttttL")
    assert sorted(resumed.losses) == [5, 6, 7, 8]
    for iteration in resumed.losses:
        assert resumed.losses[iteration] == whole.losses[iteration]
        assert resumed.grad_norms[iteration] == whole.grad_norms[iteration]
        assert resumed.digests[iteration] == whole.digests[iteration]


_validated = []


def record_validation(rank):
    """Keep the losses of every evaluation; only the last stage has some."""
    from megatron.training import training

    evaluate = training.evaluate

    def recorded(*args, **kwargs):
        found = evaluate(*args, **kwargs)
        _validated.append({name: exact(loss) for name, loss in found[0].items()})
        return found

    training.evaluate = recorded


def validated(step, model, optimizer):
    """Losses of the evaluations so far."""
    return list(_validated)


@pytest.mark.parametrize("case", EVALUATED)
def test_evaluation_in_the_midst_of_a_dynamic_changes_nothing_and_is_the_same_after_moves(case):
    cell = cell_of(case, SETTINGS[0])

    def train(*flags):
        return run_ranks(
            *(train_ours, 2, validated, record_validation, *cell.flags, "--split", "90,8,2"),
            *("--train-iters", "7", "--lr-decay-iters", "7", "--clip-grad", "1.0", *flags),
            timeout_s=240,
        )

    evaluated = ("--eval-interval", "2", "--eval-iters", "1")
    never = train("--dynmo-force-layout", "99:Ett|ttL")
    still = train("--dynmo-force-layout", "99:Ett|ttL", *evaluated)
    moved = train("--dynmo-force-layout", "3:E|ttttL;5:Et|tttL", *evaluated)
    for runs in zip(never, still, moved, strict=True):
        assert runs[0]["losses"] == runs[1]["losses"] == runs[2]["losses"]
        assert runs[0]["grad_norms"] == runs[1]["grad_norms"] == runs[2]["grad_norms"]
        assert runs[1]["watched"] == runs[2]["watched"]
    for name in ("parameters", "moments"):
        assert [rank[name] for rank in never] == [rank[name] for rank in still]
    *_, seen = still[-1]["watched"]
    assert len(seen) == 3 and len({losses["lm loss"] for losses in seen}) == 3


def evaluations(rank, world_size, *argv):
    """Run the drop-in to its end; losses of every evaluation on this rank."""
    from megatron_dynmo import launch

    sys.argv = ["pretrain_gpt.py", *TINY_GPT, *argv]
    launch.start()
    record_validation(rank)
    _pretrain()
    return _validated


@pytest.mark.parametrize("case", EVALUATED)
def test_a_checkpoint_is_evaluated_without_training_as_it_was_in_it(case, tmp_path):
    cell = cell_of(case, SETTINGS[0])
    flags = (*cell.flags, "--split", "90,8,2", "--eval-interval", "8", "--eval-iters", "1")
    length = ("--train-iters", "8", "--lr-decay-iters", "8", "--clip-grad", "1.0")

    def run(*more):
        return run_ranks(evaluations, 2, *flags, *length, *more, timeout_s=240)

    trained = run(
        *("--save", str(tmp_path), "--save-interval", "8", "--dynmo-force-layout", "6:Ettt|tL")
    )
    evaluated = run("--load", str(tmp_path), "--skip-train")
    # On the test set at the end, the same samples in both.
    assert evaluated[-1][-1] and evaluated[-1][-1] == trained[-1][-1]

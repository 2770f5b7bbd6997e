"""The conformance suite of all dynamics: exact under moves, exact over a resume."""

import pytest

from tests.e2e.conformance import CASES, SETTINGS, cell_of
from tests.e2e.moving import train_ours
from tests.e2e.parity import compare, read_trace
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

"""`dynmo doctor` reads Megatron's own argument line and says whether layers can be moved."""

import json

import pytest

from megatron_dynmo.__main__ import main
from megatron_dynmo.adapters.support import UNSUPPORTED
from megatron_dynmo.commands import doctor as command

LINE = ("--num-layers", "8", "--pipeline-model-parallel-size", "2", "--hidden-size", "64")


@pytest.fixture
def doctor(capsys):
    def ask(*words):
        status = main(["doctor", "--json", *words])
        return status, json.loads(capsys.readouterr().out)

    return ask


def test_a_run_whose_layers_can_be_moved(doctor):
    status, answer = doctor("--", *LINE)
    assert status == 0 and answer["can_move"] and answer["reasons"] == []
    assert answer["layout"] == "Et*4|t*4L" and answer["patch_problems"] == []
    assert [row["flag"] for row in answer["features"]] == [found.flag for found in UNSUPPORTED]
    assert not any(row["in_use"] for row in answer["features"])
    assert answer["versions"]["megatron-core"].startswith("0.19")
    assert answer["dynamics"] == []
    assert {"torch", "transformer-engine", "apex"} <= answer["versions"].keys()


def test_every_reason_is_named_at_once(doctor):
    status, answer = doctor(
        "--stages", "3", "--", *LINE, "--optimizer", "lion", "--use-megatron-fsdp", "--of-a-fork"
    )
    assert status == 1 and not answer["can_move"]
    in_use = [row["flag"] for row in answer["features"] if row["in_use"]]
    assert in_use == ["--use-megatron-fsdp", "--optimizer"]
    fsdp, optimizer, split = answer["reasons"]
    assert fsdp.startswith("--use-megatron-fsdp: ") and optimizer.startswith("--optimizer: ")
    assert "8 layers do not divide" in split and answer["layout"] is None
    assert any("--of-a-fork" in note for note in answer["notes"])
    assert any("2 pipeline stages, looked at are 3" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--num-layers", "8"], "one pipeline stage"),
        (["--pipeline-model-parallel-size", "2"], "no --num-layers"),
        ([*LINE, "--dynmo-mode", "observe"], "--dynmo-mode observe moves nothing"),
        ([*LINE, "--dynmo-force-layout", "3:Et*5|t*2L"], "7 of 8 layers"),
        ([*LINE, "--pipeline-model-parallel-layout", "Et*5|t*2L"], "7 of 8 layers"),
        (
            [*LINE, "--dynmo-freeze", "schedule", "--dynmo-freeze-schedule", "5:99"],
            "freezing: --dynmo-freeze-schedule freezes layer 99 of 8",
        ),
        (
            [*LINE, "--dynmo-early-exit", "confidence", "--mtp-num-layers", "1"],
            "early_exit: --mtp-num-layers",
        ),
        (
            [*LINE, "--dynmo-freeze", "autofreeze", "--use-nccl-ub"],
            "--use-nccl-ub: ",
        ),
    ],
)
def test_one_reason_is_enough(doctor, words, reason):
    status, answer = doctor("--", *words)
    (found,) = answer["reasons"]
    assert status == 1 and reason in found


def test_what_only_a_file_knows_is_not_judged(doctor):
    status, answer = doctor("--stages", "2", "--", "--use-checkpoint-args")
    assert status == 0 and answer["layout"] is None
    assert any("--use-checkpoint-args" in note for note in answer["notes"])


def test_patches_that_do_not_fit_are_a_reason(doctor, monkeypatch):
    problem = {
        "patch": "train-step", "target": "a:b", "kind": "parameters differ", "expected": "x",
        "found": "y", "fix": "",
    }  # fmt: skip
    monkeypatch.setattr(command, "_patch_problems", lambda config, gpus: [problem])
    status, answer = doctor("--", *LINE)
    (reason,) = answer["reasons"]
    assert status == 1 and "train-step" in reason and "parameters differ" in reason


def test_a_person_reads_a_table(capsys):
    assert main(["doctor", "--", *LINE, "--use-megatron-fsdp"]) == 1
    out = capsys.readouterr().out
    verdict, *rest = out.splitlines()
    assert verdict.startswith("cannot be moved: --use-megatron-fsdp")
    refused, *_ = [line for line in rest if "--use-megatron-fsdp" in line]
    assert "refused" in refused
    assert f"not in use: {len(UNSUPPORTED) - 1} features" in out and "dynamics: none" in out
    assert "patches: fit" in out
    freezing = ("--dynmo-freeze", "schedule", "--dynmo-freeze-schedule", "4:2")
    assert main(["doctor", "--all", "--", *LINE, *freezing]) == 0
    out = capsys.readouterr().out
    assert out.startswith("layers of this run can be moved") and "dynamics: freezing" in out
    assert out.count("not in use") == len(UNSUPPORTED)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give Megatron's arguments behind --"),
        (["--stages", "0", "--", *LINE], "at least 1"),
        (["--", "--num-layers", "many"], "--num-layers: invalid int value"),
        (["--num-layers", "8"], "Megatron's arguments go behind --"),
    ],
)
def test_wrong_use_is_answered_in_one_line(capsys, words, text):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *words])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line

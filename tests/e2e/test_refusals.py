"""What cannot work ends in one line and status 2 on every rank, before anything is trained."""

import pytest

from tests.e2e.moving import answers
from tests.ranks import run_ranks

PP2 = ("--pipeline-model-parallel-size", "2")
LAYOUT = "--pipeline-model-parallel-layout"
FORCE = "--dynmo-force-layout"

CASES = {
    "unknown letters": ((*PP2, LAYOUT, "Etx|ttL"), ["unknown letters 'x'", "'Etx|ttL'"]),
    "count": ((*PP2, LAYOUT, "Et|ttL"), ["3 of 4 layers", "add 1 t"]),
    "59 of 61": (
        (*PP2, "--num-layers", "61", LAYOUT, "Et|(tt|)*29L"),
        ["59 of 61 layers", "31 chunks", "add 2 t"],
    ),
    "stages": ((*PP2, LAYOUT, "Et|t|ttL"), ["3 chunks on 2 pipeline stages"]),
    "no embedding": ((*PP2, LAYOUT, "tt|ttL"), ["0 E (embedding)"]),
    "case 01": ((*PP2, "--num-layers", "5"), ["5 layers do not divide", "'Et*3|ttL'"]),
    "case 02": (
        (*PP2, "--num-layers", "8", "--decoder-first-pipeline-num-layers", "2",
         "--decoder-last-pipeline-num-layers", "3"),
        ["5 of 8 layers", "Et*4|t*4L"],
    ),
    "case 04": (
        (*PP2, "--num-layers", "7", "--num-layers-per-virtual-pipeline-stage", "2"),
        ["3 layers would be left over"],
    ),
    "case 10": (
        (*PP2, "--decoder-first-pipeline-num-layers", "1", LAYOUT, "Et|tttL"),
        ["--decoder-first-pipeline-num-layers cannot stand beside it"],
    ),
    "forced count": ((*PP2, FORCE, "3:Et|ttL"), ["3 of 4 layers"]),
    "forced stages": ((*PP2, FORCE, "3:Et|t|ttL"), ["3 chunks on 2 pipeline stages"]),
    "forced in observe": (
        (*PP2, FORCE, "3:Et|tttL", "--dynmo-mode", "observe"),
        ["--dynmo-mode observe does not"],
    ),
    # Without CUDA some have no place at all, and that is said first; tests/unit/test_support.py
    # reads why they cannot be moved.
    "cuda graphs": ((*PP2, "--cuda-graph-impl", "local"), ["--cuda-graph-impl"]),
    "megatron fsdp": ((*PP2, "--use-megatron-fsdp"), ["--use-megatron-fsdp"]),
    "fsdp2": ((*PP2, "--use-torch-fsdp2"), ["--use-torch-fsdp2"]),
    "activation offload": (
        (*PP2, "--cpu-offloading-num-layers", "1"), ["--cpu-offloading-num-layers"],
    ),
    "fine-grained offload": (
        (*PP2, "--fine-grained-activation-offloading"),
        ["--fine-grained-activation-offloading"],
    ),
    "optimizer offload": (
        (*PP2, "--optimizer-cpu-offload"), ["--optimizer-cpu-offload"],
    ),
    "constant structure": (
        (*PP2, "--ckpt-assume-constant-structure"),
        ["--ckpt-assume-constant-structure"],
    ),
    "two features": (
        (*PP2, "--ckpt-assume-constant-structure", "--optimizer", "lion"),
        ["cannot move layers with --ckpt-assume-constant-structure: ", "--optimizer: ",
         "--dynmo-mode observe"],
    ),
}  # fmt: skip


def check(table: list[tuple], cases: list[str], words: list[list[str]]) -> None:
    speaker, silent = table
    for case, expected, (status, said), (other_status, other_said) in zip(
        cases, words, speaker, silent, strict=True
    ):
        assert (status, other_status) == (2, 2), (case, said, other_said)
        lines = [line for line in said.splitlines() if line.startswith("dynmo: error: ")]
        assert len(lines) == 1, (case, said)
        assert "Traceback" not in said, (case, said)
        assert "dynmo: error" not in other_said, (case, other_said)
        for word in expected:
            assert word in lines[0], (case, lines[0])


def test_wrong_layouts_and_features_that_cannot_be_moved():
    found = run_ranks(answers, 2, [words for words, _ in CASES.values()], timeout_s=280)
    check(found, list(CASES), [expected for _, expected in CASES.values()])


MTP = (*PP2, "--mtp-num-layers", "1", "--position-embedding-type", "rope")
# Told only from the finished model, so each needs a process of its own.
LATE = {
    "last layer with MTP": (
        (*MTP, FORCE, "2:Etttt|mL"),
        ["moves layer 4, the last one", "multi-token-prediction", "(pp_rank, vp_stage) (1, 0)"],
    ),
    "virtual stages": (
        (*PP2, FORCE, "2:Et|t|t|tL"),
        ["2 virtual stages, the running model has 1"],
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_moves_that_the_finished_model_cannot_make(case):
    words, expected = LATE[case]
    check(run_ranks(answers, 2, [words]), [case], [expected])

"""Losses, gradient norms, parameters and moments of a moved run equal those of the unmoved one."""

from itertools import product

import pytest

from tests.e2e.parity import Cell, compare

PRECISIONS = {
    "fp32": (),
    "bf16": ("--bf16",),
    "fp16": ("--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "2"),
    "fp32 distopt": ("--use-distributed-optimizer",),
    "bf16 distopt overlap": (
        "--bf16",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ),
}
# At 3, 5 and 8, through a stage without layers and back.
TWO_STAGES = "3:Ettt|tL;5:E|ttttL;8:Ettt|tL"
FOUR_STAGES = "3:Ett|t||tL;5:E|t|tt|tL;8:Et|t|t|tL"
PIPELINES = {
    "PP 2": (2, ("--pipeline-model-parallel-size", "2"), TWO_STAGES),
    "PP 2 x DP 2": (4, ("--pipeline-model-parallel-size", "2"), TWO_STAGES),
    "PP 4": (4, ("--pipeline-model-parallel-size", "4"), FOUR_STAGES),
}
EMBEDDINGS = {"tied": (), "untied": ("--untie-embeddings-and-output-weights",)}


def _cell(precision: str, pipeline: str, embeddings: str) -> Cell:
    ranks, flags, moves = PIPELINES[pipeline]
    return Cell(
        f"{precision}, {pipeline}, {embeddings}",
        ranks,
        (*flags, *PRECISIONS[precision], *EMBEDDINGS[embeddings]),
        moves,
    )


TABLE = [_cell(*names) for names in product(PRECISIONS, PIPELINES, EMBEDDINGS)]
DIAGONAL = [
    _cell("fp32", "PP 2", "tied"),
    _cell("bf16", "PP 4", "untied"),
    _cell("fp16", "PP 2", "untied"),
    _cell("fp32 distopt", "PP 2 x DP 2", "tied"),
    _cell("bf16 distopt overlap", "PP 2 x DP 2", "untied"),
    _cell("bf16 distopt overlap", "PP 4", "tied"),
]
PP2 = ("--pipeline-model-parallel-size", "2")
FURTHER = [
    Cell(
        "fp32 distopt overlap, PP 2 x DP 2",
        4,
        (*PP2, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        TWO_STAGES,
    ),
    Cell(
        "fp32, PP 2 x 2 virtual stages",
        2,
        (*PP2, "--num-layers-per-virtual-pipeline-stage", "1"),
        "3:Ett|t||tL;5:E|ttt||tL;8:Et|t|t|tL",
    ),
    Cell(
        "fp32, PP 2, full recompute",
        2,
        (
            *PP2,
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ),
        TWO_STAGES,
    ),
    Cell("fp32, PP 2 x TP 2", 4, (*PP2, "--tensor-model-parallel-size", "2"), TWO_STAGES),
    Cell(
        "bf16, PP 2, MoE with a dense first layer",
        2,
        (
            *PP2,
            "--bf16",
            "--num-experts",
            "4",
            "--moe-router-topk",
            "2",
            "--moe-layer-freq",
            "([0]*1+[1]*3)",
            "--disable-bias-linear",
            "--moe-token-dispatcher-type",
            "alltoall",
        ),
        TWO_STAGES,
    ),
    Cell(
        "fp32, PP 2, dropout with --dynmo-layer-rng",
        2,
        (
            *PP2,
            "--attention-dropout",
            "0.1",
            "--hidden-dropout",
            "0.1",
            "--dynmo-layer-rng",
        ),
        TWO_STAGES,
    ),
]

# Run by test_matrix alone.
SLOW = [
    Cell(
        "bf16 distopt overlap, PP 2 x EP 2, MoE with shared experts",
        4,
        (
            *PP2,
            *PRECISIONS["bf16 distopt overlap"],
            *("--expert-model-parallel-size", "2", "--num-experts", "4", "--moe-router-topk", "2"),
            *("--moe-layer-freq", "([0]*1+[1]*3)", "--disable-bias-linear"),
            *("--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "32"),
            *("--moe-shared-expert-intermediate-size", "32"),
        ),
        TWO_STAGES,
    ),
]


# Covered in CI by the conformance of dynamics, by the dropout streams and by the other cells.
MATRIX_ONLY = (
    "bf16, PP 2, MoE with a dense first layer",
    "fp32 distopt overlap, PP 2 x DP 2",
    "fp32, PP 2, full recompute",
    "fp32, PP 2, dropout with --dynmo-layer-rng",
    "fp32, PP 2 x TP 2",
)
IN_CI = [cell for cell in DIAGONAL[:-1] + FURTHER if cell.name not in MATRIX_ONLY]


@pytest.mark.parametrize("cell", IN_CI, ids=lambda cell: cell.name)
def test_a_moved_run_equals_the_unmoved_one(cell, tmp_path):
    row = compare(cell, tmp_path)
    assert row["loss_equal"] and row["digests_equal"], row


@pytest.mark.matrix
@pytest.mark.parametrize("cell", TABLE + FURTHER + SLOW, ids=lambda cell: cell.name)
def test_matrix(cell, tmp_path, parity_results):
    row = compare(cell, tmp_path)
    parity_results.append(row)
    assert row["loss_equal"] and row["digests_equal"], row

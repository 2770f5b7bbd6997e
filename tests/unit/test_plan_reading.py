"""`dynmo plan` reads Megatron's argument lines and model cards, and says what it does not know."""

import json
import shlex

import pytest

from megatron_dynmo.__main__ import main
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.planner.megatron_flags import parse_pattern
from megatron_dynmo.planner.model_card import model_from_card
from tests.unit.plan_models import CARDS, DEEPSEEK_V3, LLAMA_3, RUN, line, plan_json


def test_flags_that_change_the_model_and_are_not_understood_are_named():
    planned = line(
        LLAMA_3 + RUN + "--moe-new-thing 3 --spec a b --log-interval 1 --data-path 10 A 20 B "
        "--moe-grouped-gemm --moe-aux-loss-coeff 1e-3 --lr 1e-4 --fp8-format hybrid "
        "--optimizer muon --experimental-attention-variant gated_delta_net"
    )
    named = [warning.split()[0] for warning in planned.warnings]
    assert sorted(named) == [
        "--experimental-attention-variant", "--fp8-format", "--moe-new-thing", "--optimizer",
        "--spec",
    ]  # fmt: skip


def test_a_whole_command_line_can_be_pasted(capsys):
    words = ["torchrun", "--nproc_per_node", "8", "pretrain_gpt.py", *shlex.split(LLAMA_3 + RUN)]
    result = plan_json(capsys, "--", *words, "--pipeline-model-parallel-size", "8", "--lr=1e-4")
    assert len(result["stages"]) == 8
    assert result["parameters"]["total"] == 70_553_706_496
    assert not result["warnings"]


def test_the_last_of_two_equal_flags_wins():
    assert line(LLAMA_3 + "--num-layers 40").model.num_layers == 40


def test_micro_batches_follow_from_the_batch_sizes():
    text = LLAMA_3 + "--micro-batch-size 2 --global-batch-size 512 --seq-length 4096"
    assert line(text, world_size=32).setup.num_microbatches == 32
    assert line(text, num_microbatches=7).setup.num_microbatches == 7
    with pytest.raises(ConfigError, match="global batch 512 does not divide"):
        line(text, world_size=28)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--hidden-size 8", "no --num-layers"),
        ("--num-layers 2 --vocab-size 8", "no --hidden-size"),
        ("--num-layers two", "invalid int value"),
        (LLAMA_3.replace("--vocab-size 128256", ""), "add --vocab-size"),
        (LLAMA_3 + "--num-query-groups 7", "7 query groups"),
        (LLAMA_3 + "--window-size 127", "two numbers"),
        (DEEPSEEK_V3 + "--moe-layer-freq ([0]*3+[1]*57)", "60 of 61 layers"),
        (DEEPSEEK_V3 + "--group-query-attention", "exclude each other"),
        (LLAMA_3 + "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|t|t|tL",
         "3 of 80 layers"),
        (LLAMA_3 + "--decoder-first-pipeline-num-layers 1 --pipeline-model-parallel-layout E|t|t|L",
         "more than once"),
        (LLAMA_3 + "--recompute-granularity some", "full or selective"),
    ],
)  # fmt: skip
def test_lines_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        line(text)


def test_the_list_language_of_megatron():
    assert parse_pattern("([0]*3+[1]*2)", "--moe-layer-freq", 5) == [0, 0, 0, 1, 1]
    assert parse_pattern("([1]*2+[0]*1)*2", "--moe-layer-freq", 6) == [1, 1, 0, 1, 1, 0]
    assert parse_pattern("[1,0,1]", "--moe-layer-freq", 3) == [1, 0, 1]
    assert parse_pattern("2", "--moe-layer-freq", 3) == 2
    bad = (
        "[0]*3 + [1]*2", "[0]*9999999999", "[2]*3", "__import__('os')", "[1", "x", "0", "[[1]]*3",
        "[1]+1", "[1]*[1]",
    )  # fmt: skip
    for text in bad:
        with pytest.raises(ConfigError, match="--moe-layer-freq"):
            parse_pattern(text, "--moe-layer-freq", 3)


# ---------------------------------------------------------------- cards


def test_a_card_and_flags_of_the_run_go_together(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CARDS["GLM-4.5"]))
    result = plan_json(
        capsys, "--model", path, "--stages", 8, "--", "--seq-length", "8192", "--bf16",
        "--tensor-model-parallel-size", "8",
    )  # fmt: skip
    assert result["parameters"]["total"] == 352_797_814_784
    assert "8,192 tokens x 1" in " ".join(result["assumptions"])
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(path), "--stages", "8", "--", "--num-layers", "4"])
    assert "described twice" in capsys.readouterr().err


def test_padding_is_said(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CARDS["DeepSeek-V3"]))
    result = plan_json(
        capsys, "--model", path, "--stages", 4, "--", "--tensor-model-parallel-size", "8"
    )
    assert "vocabulary 129,280 is padded to 130,048, as Megatron does" in result["assumptions"]
    assert result["parameters"]["total"] == 671_026_404_352 + 2 * 768 * 7168


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"layer_types": ["linear_attention"] * 94}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "must list 94 layers"),
        ({"vision_config": {}}, "vision_config"),
    ],
)
def test_cards_that_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        model_from_card(CARDS["Qwen3-235B-A22B"] | change)


def test_an_unknown_kind_of_model_is_a_warning():
    _, warnings = model_from_card(CARDS["Llama-3-70B"] | {"model_type": "new"})
    assert "model_type new is unknown" in warnings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "an object is needed"), (None, "cannot read")],
)
def test_files_that_are_no_card(capsys, tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(path), "--stages", "2"])
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error

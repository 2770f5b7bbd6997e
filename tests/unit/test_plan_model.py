"""`dynmo plan` from model cards and from Megatron's arguments: counts to the digit, and costs."""

import json
import shlex
import subprocess
import sys

import pytest

from megatron_dynmo.__main__ import main
from megatron_dynmo.planner.model_card import model_from_card
from tests.unit.plan_models import CARDS, DEEPSEEK_V3, LINES, LLAMA_3, RUN, line, plan_json

# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", LINES)
def test_parameters_of_megatron_lines_to_the_digit(name):
    text, expected = LINES[name]
    planned = line(text)
    assert planned.model.num_parameters == expected
    assert not [warning for warning in planned.warnings if "refuses" not in warning]


@pytest.mark.parametrize("name", CARDS)
def test_parameters_of_cards_to_the_digit(name):
    model, warnings = model_from_card(CARDS[name])
    assert model.num_parameters == LINES[name][1]
    assert not warnings


@pytest.mark.parametrize("name", CARDS)
def test_card_and_line_describe_the_same_layers(name):
    card, _ = model_from_card(CARDS[name])
    assert line(LINES[name][0]).model.layers == card.layers


def test_mtp_layers_are_counted_apart(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CARDS["DeepSeek-V3"]))
    result = plan_json(capsys, "--model", path, "--stages", 16)
    assert result["parameters"]["total"] == 671_026_404_352
    assert "bf16 without dropout" in result["assumptions"][0]
    assert any("2 + 4 + 12 bytes a parameter" in text for text in result["assumptions"])
    # One MoE layer, a projection of two hidden states to one, and three norms.
    model, _ = model_from_card(CARDS["DeepSeek-V3"])
    layer = model.layers[-1].num_parameters(7168, 1)
    assert result["parameters"]["mtp"] == layer + 2 * 7168**2 + 3 * 7168
    assert result["layout"].count("m") == 1
    assert result["boundaries"][-1] == 61
    from_line = plan_json(
        capsys, "--stages", 16, "--", *shlex.split(DEEPSEEK_V3 + RUN + "--mtp-num-layers 1")
    )
    assert from_line["parameters"] == result["parameters"]
    assert from_line["layout"].endswith("mL")


def test_tied_weights_learned_positions_and_biases():
    text = "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    text += "--seq-length 32 --max-position-embeddings 32 --vocab-size 127"
    model = line(text).model
    assert model.vocab_size == 128
    assert model.layers[0].num_parameters(32, 2) == 8_544
    assert model.embedding == 5_120
    assert model.num_parameters == 4 * 8_544 + 5_120 + 64
    untied = line(text + " --untie-embeddings-and-output-weights").model
    assert untied.num_parameters == model.num_parameters + 128 * 32


@pytest.mark.parametrize(("size", "padded"), [(127, 128), (128, 128), (129, 256)])
def test_the_output_layer_has_the_padded_vocabulary(capsys, size, padded):
    text = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
    text += f"--vocab-size {size} " + RUN
    assert line(text).model.vocab_size == padded
    assert line(text + "--tensor-model-parallel-size 3").model.vocab_size == 384
    assert line(text + "--no-pad-vocab-size").model.vocab_size == size
    assert line(text + "--padded-vocab-size 1000").model.vocab_size == 1000
    at = [
        plan_json(capsys, "--stages", 2, "--device-tflops", 1, "--", *shlex.split(line_text))
        for line_text in (text, text.replace(f"--vocab-size {size}", "--vocab-size 128"))
    ]
    loss = [
        result["stages"][1]["forward_ms"]
        - result["stages"][0]["forward_ms"] * result["stages"][1]["layers"]
        / result["stages"][0]["layers"]
        for result in at
    ]  # fmt: skip
    assert loss[0] / loss[1] == pytest.approx(padded / 128, rel=0.3)


# ---------------------------------------------------------------- times


def test_a_windowed_layer_costs_less_and_only_its_core():
    planned = line(LINES["gpt-oss-120b"][0] + " " + RUN)
    windowed, full = (layer.attention for layer in planned.model.layers[:2])
    assert (windowed.window, full.window) == (128, None)
    # 127 queries see fewer than 128 tokens, the other 3,969 see 128.
    assert windowed.core_flops(4096) == 4 * 4096 * (128 * 129 / 2 + 3968 * 128) / 4096
    assert full.core_flops(4096) == 4 * 4096 * 4097 / 2
    assert windowed.matrices(2880) == full.matrices(2880)


def test_flops_of_a_dense_layer_are_the_closed_form():
    from megatron_dynmo.planner.setup import Device
    from megatron_dynmo.planner.work import Work

    planned = line(LLAMA_3 + RUN)
    layer = planned.model.layers[0]
    h, f, s, kv = 8192, 28672, 4096, 1024
    per_token = 2 * (h * (2 * h + 2 * kv) + 3 * h * f) + 4 * h * (s + 1) / 2
    work = Work(planned.model, planned.setup, Device.of(1, 300))
    assert work.layer_flops(layer) == s * per_token
    # On a device whose memory is endlessly fast only FLOPs count, and the backward is twice.
    fast = Work(planned.model, planned.setup, Device.of(1, 1e-12))
    forward, backward = fast.layer(layer)
    assert forward == pytest.approx(s * per_token / 1e9)
    assert backward == pytest.approx(2 * forward)
    assert fast.output()[0] == pytest.approx(2 * s * h * 128256 / 1e9)
    # A device that only moves bytes is never faster.
    assert work.layer(layer)[0] > forward


@pytest.mark.parametrize(
    ("flags", "ratio"),
    [
        ("", 2.0),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 3.0),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 5", 2.25),
        ("--recompute-granularity selective --recompute-modules mlp", None),
    ],
)
def test_recompute_costs_time_and_saves_memory(capsys, flags, ratio):
    words = shlex.split(LLAMA_3 + RUN + flags)
    result = plan_json(capsys, "--stages", 4, "--", *words)
    plain = plan_json(capsys, "--stages", 4, "--", *shlex.split(LLAMA_3 + RUN))
    stage, before = result["stages"][1], plain["stages"][1]
    found = stage["backward_ms"] / stage["forward_ms"]
    assert stage["forward_ms"] / stage["layers"] == pytest.approx(
        before["forward_ms"] / before["layers"]
    )
    if ratio is None:
        assert 2.2 < found < 3
    else:
        assert found == pytest.approx(ratio)
    kept = stage["activation_bytes"] / stage["layers"]
    unkept = before["activation_bytes"] / before["layers"]
    assert (kept < unkept) if flags else (kept == unkept)


def test_relative_units_and_ms(capsys):
    words = ["--stages", 4, "--", *shlex.split(LLAMA_3 + RUN)]
    relative = plan_json(capsys, *words)
    assert relative["unit"] == "units"
    assert relative["stages"][1]["forward_ms"] == pytest.approx(relative["stages"][1]["layers"])
    slow, fast = (plan_json(capsys, "--device-tflops", x, *words) for x in (100, 400))
    assert slow["unit"] == "ms"
    assert slow["iteration_ms"] == pytest.approx(4 * fast["iteration_ms"])
    assert slow["layout"] == relative["layout"]


# ---------------------------------------------------------------- memory


def test_memory_of_a_stage_by_hand(capsys):
    words = shlex.split(LLAMA_3 + RUN + "--tensor-model-parallel-size 8 --sequence-parallel")
    result = plan_json(capsys, "--stages", 4, "--current", "20x4", "--", *words)
    stages = result["current"]["stages"]
    layer = 8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672
    states = 18 * (20 * (layer / 8 + 2 * 8192))
    # The vocabulary is padded to a multiple of 8 x 128.
    states_of = [stage["memory_bytes"] - stage["activation_bytes"] for stage in stages]
    assert states_of[1] == pytest.approx(states, abs=100)
    assert states_of[0] == pytest.approx(states + 18 * 129024 * 8192 / 8, abs=100)
    assert states_of[3] == pytest.approx(states + 18 * (129024 * 8192 / 8 + 8192), abs=100)
    # Two norms and their outputs, queries, keys, values and output of the core, its sums, and
    # both sides of the activation function.
    token = 2 * (4 * 8192 + 2 * 8192 + 2 * 1024 + 3 * 28672) + 4 * 64
    assert stages[1]["activation_bytes"] == pytest.approx(3 * 20 * 4096 * token / 8, rel=1e-6)
    assert stages[2]["activation_bytes"] == pytest.approx(2 * 20 * 4096 * token / 8, rel=1e-6)


def test_the_distributed_optimizer_splits_its_state(capsys):
    words = shlex.split(LLAMA_3 + RUN)
    plain = plan_json(capsys, "--stages", 4, "--world-size", 32, "--", *words)
    split = plan_json(
        capsys, "--stages", 4, "--world-size", 32, "--", *words, "--use-distributed-optimizer"
    )
    states = [
        result["stages"][1]["memory_bytes"] - result["stages"][1]["activation_bytes"]
        for result in (plain, split)
    ]
    assert states[1] / states[0] == pytest.approx((6 + 12 / 8) / 18)


def test_experts_are_split_over_their_ranks():
    narrow = line(DEEPSEEK_V3 + RUN, num_stages=16)
    wide = line(DEEPSEEK_V3 + RUN + "--expert-model-parallel-size 64", num_stages=16)
    assert wide.setup.data_parallel == 64
    layer = wide.model.layers[10]
    shares = wide.model.parameters_of(layer)
    assert shares["expert"] == 256 * 3 * 7168 * 2048
    difference = narrow.setup.state_bytes(shares) - wide.setup.state_bytes(shares)
    assert difference == 18 * shares["expert"] * 63 // 64


def test_precision():
    for flags, expected in {
        "": (4, 4, 8),
        "--bf16": (2, 4, 12),
        "--fp16": (2, 2, 12),
        "--fp16 --accumulate-allreduce-grads-in-fp32": (2, 4, 12),
        "--bf16 --optimizer sgd": (2, 4, 8),
        "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype fp8": (2, 2, 7),
    }.items():
        precision = line(LLAMA_3 + flags).setup.precision
        assert (precision.weight, precision.gradient, precision.optimizer) == expected


def test_a_memory_cap_moves_layers_off_the_first_stages(capsys):
    words = shlex.split(LLAMA_3 + RUN + "--tensor-model-parallel-size 8")
    free = plan_json(capsys, "--stages", 4, "--", *words)
    peak = max(stage["memory_bytes"] for stage in free["stages"]) / 1e9
    capped = plan_json(capsys, "--stages", 4, "--memory-cap-gb", 0.93 * peak, "--", *words)
    assert max(stage["memory_bytes"] for stage in capped["stages"]) <= 0.93 * peak * 1e9
    assert capped["stages"][0]["layers"] < free["stages"][0]["layers"]
    with pytest.raises(SystemExit):
        main(["plan", "--stages", "4", "--memory-cap-gb", "20", "--", *words])
    assert "no split fits in memory" in capsys.readouterr().err


# ---------------------------------------------------------------- the line


def test_the_present_layout_is_the_one_of_the_line():
    base = LLAMA_3 + RUN + "--pipeline-model-parallel-size 8 "
    expect = {
        "": [10] * 8,
        "--decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 6": [
            8, *[11] * 6, 6
        ],
        "--pipeline-model-parallel-layout Et*9|(t*10|)*5t*10|t*11L": [9, *[10] * 6, 11],
    }  # fmt: skip
    for flags, sizes in expect.items():
        current = line(base + flags, num_stages=None).current
        assert [current.num_layers_of_rank(rank) for rank in range(8)] == sizes
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    text = base.replace("--num-layers 80", "--num-layers 78") + both
    current = line(text, num_stages=None).current
    assert [current.num_layers_of_rank(r) for r in range(8)] == [9, *[10] * 6, 9]
    chunks = line(base + "--num-layers-per-virtual-pipeline-stage 5", num_stages=None)
    assert chunks.virtual_stages == chunks.current.virtual_stages == 2
    other = line(base, num_stages=4)
    assert other.current is None
    assert "8 pipeline stages, planned are 4" in other.warnings[0]


def test_layers_that_megatron_cannot_split_are_planned_all_the_same(capsys):
    result = plan_json(capsys, "--stages", 4, "--", *shlex.split(DEEPSEEK_V3 + RUN))
    assert any("Megatron refuses to split 61 layers" in text for text in result["warnings"])
    assert result["boundaries"][-1] == 61


# ---------------------------------------------------------------- what people see


def test_the_text_states_parameters_assumptions_and_warnings(capsys):
    words = shlex.split(DEEPSEEK_V3 + RUN + "--mtp-num-layers 1 --moe-new-thing 1")
    assert main(["plan", "--stages", "16", "--", *words]) == 0
    out = capsys.readouterr().out
    assert "parameters 671,026,404,352, of which a token uses" in out
    assert "in 1 MTP layers" in out
    assert "assumed: 1 unit is the forward of the average decoder layer" in out
    assert "assumed: memory: 2 + 4 + 12 bytes a parameter" in out
    assert "assumed: tokens spread evenly over the experts" in out
    assert "warning: --moe-new-thing is unknown here" in out
    assert "whatever the layout; bubble" in out


def test_planning_imports_neither_torch_nor_megatron():
    code = (
        "import sys\n"
        "from megatron_dynmo.__main__ import main\n"
        "status = main(sys.argv[1:])\n"
        "assert not {'torch', 'megatron'} & set(sys.modules), 'imported'\n"
        "sys.exit(status)\n"
    )
    words = ["plan", "--stages", "4", "--", *shlex.split(LLAMA_3 + RUN)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("layout E")

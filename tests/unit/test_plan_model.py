"""`dynmo plan` from model cards and from Megatron's arguments: counts to the digit, and costs."""

import json
import shlex
import subprocess
import sys

import pytest

from megatron_dynmo.__main__ import main
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.planner.megatron_flags import parse_pattern
from megatron_dynmo.planner.megatron_line import read_line
from megatron_dynmo.planner.model_card import model_from_card

MODERN = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights "
)
RUN = "--seq-length 4096 --micro-batch-size 1 --bf16 --hidden-dropout 0 "
DEEPSEEK_V3 = MODERN + (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512 "
    "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --vocab-size 129280 "
)
GLM_5 = MODERN + (
    "--num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288 --num-attention-heads 64 "
    "--multi-latent-attention --qk-layernorm --q-lora-rank 2048 --kv-lora-rank 512 "
    "--qk-head-dim 192 --v-head-dim 256 --experimental-attention-variant dsa "
    "--dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 "
    "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*75) "
    "--vocab-size 154880 "
)
GROUPED = MODERN + "--group-query-attention --kv-channels 128 "
GPT_OSS = (
    "--swiglu --normalization RMSNorm --position-embedding-type yarn "
    "--untie-embeddings-and-output-weights --hidden-size 2880 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8 --kv-channels 64 --softmax-type learnable "
    "--window-size 127,0 --window-attn-skip-freq 2 --ffn-hidden-size 2880 --moe-router-topk 4 "
    "--vocab-size 201088 "
)
LLAMA_3 = GROUPED + (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--num-query-groups 8 --vocab-size 128256 "
)
LINES = {
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_404_352),
    "GLM-4.5": (
        GROUPED + "--num-layers 92 --hidden-size 5120 --ffn-hidden-size 12288 "
        "--num-attention-heads 96 --num-query-groups 8 --qk-layernorm --add-qkv-bias "
        "--num-experts 160 --moe-router-topk 8 --moe-ffn-hidden-size 1536 "
        "--moe-shared-expert-intermediate-size 1536 --moe-layer-freq ([0]*3+[1]*89) "
        "--vocab-size 151552",
        352_797_814_784,
    ),
    "GLM-4.5-Air": (
        GROUPED + "--num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 "
        "--num-attention-heads 96 --num-query-groups 8 --add-qkv-bias "
        "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1408 "
        "--moe-shared-expert-intermediate-size 1408 --moe-layer-freq ([0]*1+[1]*45) "
        "--vocab-size 151552",
        106_852_245_504,
    ),
    # Megatron and the published code give the indexer's key norm a weight and a bias: 256 a layer.
    "GLM-5": (GLM_5, 743_911_179_264 + 78 * 256),
    "Llama-3-70B": (LLAMA_3, 70_553_706_496),
    "Qwen3-235B-A22B": (
        GROUPED + "--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 "
        "--num-attention-heads 64 --num-query-groups 4 --qk-layernorm "
        "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --vocab-size 151936",
        235_093_634_560,
    ),
    "Qwen3-30B-A3B": (
        GROUPED + "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 "
        "--num-attention-heads 32 --num-query-groups 4 --qk-layernorm "
        "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --vocab-size 151936",
        30_532_122_624,
    ),
    "gpt-oss-120b": (GPT_OSS + "--num-layers 36 --num-experts 128", 116_829_156_672),
    "gpt-oss-20b": (GPT_OSS + "--num-layers 24 --num-experts 32", 20_914_757_184),
}

_GLM = {
    "model_type": "glm4_moe", "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "attention_bias": True, "num_experts_per_tok": 8, "n_shared_experts": 1, "vocab_size": 151552,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = {
    "model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "tie_word_embeddings": False, "attention_bias": False,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4,
    "attention_bias": True, "sliding_window": 128, "vocab_size": 201088,
    "tie_word_embeddings": False,
}  # fmt: skip
CARDS = {
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 129280, "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    },
    "GLM-4.5": _GLM | {
        "num_hidden_layers": 92, "hidden_size": 5120, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 3,
        "use_qk_norm": True,
    },
    "GLM-4.5-Air": _GLM | {
        "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "first_k_dense_replace": 1,
        "use_qk_norm": False,
    },
    "Llama-3-70B": {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192,
        "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 128256, "tie_word_embeddings": False, "attention_bias": False,
    },
    "Qwen3-235B-A22B": _QWEN | {
        "num_hidden_layers": 94, "hidden_size": 4096, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_attention_heads": 64,
    },
    "Qwen3-30B-A3B": _QWEN | {
        "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_attention_heads": 32,
    },
    "gpt-oss-120b": _OSS | {
        "num_hidden_layers": 36, "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "gpt-oss-20b": _OSS | {
        "num_hidden_layers": 24, "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}  # fmt: skip


def line(text, **options):
    return read_line(shlex.split(text), **({"num_stages": 4} | options))


def plan_json(capsys, *words):
    assert main(["plan", "--json", *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


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

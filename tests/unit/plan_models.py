"""Real models as Megatron's argument lines and as model cards, for the tests of `dynmo plan`."""

import json
import shlex

from megatron_dynmo.__main__ import main
from megatron_dynmo.planner.megatron_line import read_line

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

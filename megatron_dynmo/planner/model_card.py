"""A model from the config.json of a HuggingFace model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.planner.layers import (
    Attention,
    DenseMlp,
    GroupedAttention,
    Indexer,
    LatentAttention,
    Layer,
    MoeMlp,
)
from megatron_dynmo.planner.model import Model

__all__ = ["model_from_card", "read_card"]

# Architectures whose parameter counts are known to come out right, and what their code adds
# to the file: norms of queries and keys, biases.
_QK_NORM = {"qwen3", "qwen3_moe"}
_QKV_BIAS_ONLY = {"glm4_moe", "qwen2", "qwen2_moe"}
_BIAS_EVERYWHERE = {"gpt_oss"}
_KNOWN = (
    _QK_NORM | _QKV_BIAS_ONLY | _BIAS_EVERYWHERE
    | {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "llama", "mistral",
       "mixtral"}
)  # fmt: skip
_UNSUPPORTED = ("vision_config", "mamba_d_state", "ssm_cfg", "linear_num_key_heads", "d_model")
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def read_card(path: Path | str) -> tuple[Model, list[str]]:
    """Read a config.json.

    Returns:
        (model, its vocabulary not padded; warnings).

    Raises:
        ConfigError: the file is missing or no JSON, or a key is missing or makes no sense.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the model card {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    try:
        return model_from_card(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def model_from_card(document: Any) -> tuple[Model, list[str]]:
    """Make a model of a parsed config.json; see `read_card`."""
    if not isinstance(document, dict):
        raise ConfigError(f"an object is needed, found {type(document).__name__}")
    document = document.get("text_config", document)
    card = _Card(document)
    found = [name for name in _UNSUPPORTED if document.get(name) is not None]
    if found:
        raise ConfigError(f"{found[0]}: models with it cannot be planned from a card")
    num_layers, hidden = card.count("num_hidden_layers"), card.count("hidden_size")
    mlps = _mlps(card, num_layers)
    layers = tuple(
        Layer(attention, mlp)
        for attention, mlp in zip(_attentions(card, num_layers), mlps, strict=True)
    )
    warnings = []
    if card.kind not in _KNOWN:
        warnings.append(
            f"model_type {card.kind or 'missing'} is unknown here: check the number of parameters"
        )
    model = Model(
        hidden=hidden,
        layers=layers,
        vocab_size=card.count("vocab_size"),
        tied=bool(card.get("tie_word_embeddings", False)),
        mtp_layers=card.whole("num_nextn_predict_layers", 0),
    )
    return model, warnings


class _Card:
    """The keys of a config.json, with errors that name them."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self.kind = str(document.get("model_type", ""))

    def get(self, name: str, default: Any) -> Any:
        value = self._document.get(name)
        return default if value is None else value

    def first(self, *names: str) -> int | None:
        """The first of several spellings that is there."""
        present = [name for name in names if self._document.get(name) is not None]
        return self.count(present[0]) if present else None

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            found = "is missing" if value is None else f"is {value!r}"
            raise ConfigError(f"{name} {found}: a whole number is needed")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.whole(name, default)
        if value < 1:
            raise ConfigError(f"{name} is {value}: at least 1 is needed")
        return value


def _attentions(card: _Card, num_layers: int) -> list[Attention]:
    heads = card.count("num_attention_heads")
    if card.get("kv_lora_rank", None) is not None:
        indexer = None
        if card.get("index_n_heads", None) is not None:
            names = ("index_n_heads", "index_head_dim", "index_topk")
            indexer = Indexer(*(card.count(name) for name in names))
        latent = LatentAttention(
            heads, card.first("q_lora_rank"), card.count("kv_lora_rank"),
            card.count("qk_nope_head_dim"), card.count("qk_rope_head_dim"),
            card.count("v_head_dim"), indexer=indexer,
        )  # fmt: skip
        return [latent] * num_layers
    bias = bool(card.get("attention_bias", card.kind in _BIAS_EVERYWHERE))
    groups = card.count("num_key_value_heads", heads)
    head_dim = card.first("head_dim") or card.count("hidden_size") // heads
    qk_norm = bool(card.get("use_qk_norm", card.kind in _QK_NORM))

    def attention(window: int | None) -> GroupedAttention:
        return GroupedAttention(
            heads, groups, head_dim,
            qkv_bias=bias or card.kind in {"qwen2", "qwen2_moe"},
            output_bias=bias and card.kind not in _QKV_BIAS_ONLY,
            qk_norm=qk_norm, sinks=card.kind == "gpt_oss", window=window,
        )  # fmt: skip

    return [attention(window) for window in _windows(card, num_layers)]


def _windows(card: _Card, num_layers: int) -> list[int | None]:
    """Tokens that each layer's queries see; None for all before them."""
    window = card.first("sliding_window")
    kinds = card.get("layer_types", None)
    if kinds is None:
        if window is None or not card.get(
            "use_sliding_window", card.kind in {"mistral", "mixtral"}
        ):
            return [None] * num_layers
        return [window] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"layer_types must list {num_layers} layers, as num_hidden_layers says")
    unknown = sorted({str(kind) for kind in kinds} - {_WINDOWED, _FULL})
    if unknown:
        raise ConfigError(f"layer_types: layers of type {unknown[0]} cannot be planned")
    return [window if kind == _WINDOWED else None for kind in kinds]


def _mlps(card: _Card, num_layers: int) -> list[DenseMlp | MoeMlp]:
    bias = bool(card.get("mlp_bias", card.kind in _BIAS_EVERYWHERE))
    num_experts = card.first("n_routed_experts", "num_experts", "num_local_experts")
    if num_experts is None:
        return [DenseMlp(card.count("intermediate_size"), bias=bias)] * num_layers
    ffn = card.first("moe_intermediate_size") or card.count("intermediate_size")
    shared = card.get("shared_expert_intermediate_size", None)
    shared_ffn = card.whole("n_shared_experts", 0) * ffn if shared is None else int(shared)
    top_k = card.first("num_experts_per_tok", "experts_per_token")
    if top_k is None:
        raise ConfigError("num_experts_per_tok is missing: a whole number is needed")
    experts = MoeMlp(
        num_experts, top_k, ffn, shared_ffn=shared_ffn, bias=bias,
        shared_gate=card.kind == "qwen2_moe",
    )  # fmt: skip
    moe = _moe_layers(card, num_layers)
    dense = experts if all(moe) else DenseMlp(card.count("intermediate_size"), bias=bias)
    return [experts if is_moe else dense for is_moe in moe]


def _moe_layers(card: _Card, num_layers: int) -> list[bool]:
    """Which layers have experts: after the dense first ones, every so many, none of a list."""
    first = card.whole("first_k_dense_replace", 0)
    every = card.count("moe_layer_freq", 1)
    step = card.count("decoder_sparse_step", 1)
    dense = set(card.get("mlp_only_layers", []))
    return [
        index >= first and index % every == 0 and (index + 1) % step == 0 and index not in dense
        for index in range(num_layers)
    ]

"""Which of Megatron's flags the planner reads, which it knows to be left out, and which it fears.

Megatron itself is not asked: a person without a GPU and without Megatron can plan. Every other flag
of Megatron is passed over in silence, so only flags that change the model, its memory or its
schedule may be missing from the lists below; a test compares them with the installed Megatron.

Defaults:
Source: megatron/training/arguments.py@core_v0.19.2
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_dynmo.errors import ConfigError

__all__ = ["parse_flags", "parse_pattern", "unread_flags"]

_MAX_PATTERN = 100_000  # layers; a typing slip must not eat the memory

_NUMBERS: dict[str, int | float | None] = {
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": None,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
    "num-layers": None,
    "encoder-num-layers": None,
    "hidden-size": None,
    "num-attention-heads": None,
    "num-query-groups": 1,
    "ffn-hidden-size": None,
    "kv-channels": None,
    "seq-length": None,
    "encoder-seq-length": None,
    "max-position-embeddings": None,
    "make-vocab-size-divisible-by": 128,
    "vocab-size": None,
    "padded-vocab-size": None,
    "micro-batch-size": None,
    "global-batch-size": None,
    "num-experts": None,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": None,
    "moe-shared-expert-intermediate-size": None,
    "moe-latent-size": None,
    "mtp-num-layers": None,
    "q-lora-rank": None,
    "kv-lora-rank": 32,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
    "dsa-indexer-n-heads": None,
    "dsa-indexer-head-dim": None,
    "dsa-indexer-topk": None,
    "decoder-first-pipeline-num-layers": None,
    "decoder-last-pipeline-num-layers": None,
    "num-layers-per-virtual-pipeline-stage": None,
    "num-virtual-stages-per-pipeline-rank": None,
    "recompute-num-layers": None,
    "hidden-dropout": 0.1,
    "sgd-momentum": 0.9,
}
_TEXTS: dict[str, str | None] = {
    "position-embedding-type": "learned_absolute",
    "normalization": "LayerNorm",
    "softmax-type": "vanilla",
    "experimental-attention-variant": None,
    "moe-layer-freq": "1",
    "window-size": None,
    "window-attn-skip-freq": None,
    "pipeline-model-parallel-layout": None,
    "recompute-granularity": None,
    "recompute-method": None,
    "transformer-impl": "transformer_engine",
    "attention-backend": "auto",
    "optimizer": "adam",
    "main-grads-dtype": "fp32",
    "main-params-dtype": "fp32",
    "exp-avg-dtype": "fp32",
    "exp-avg-sq-dtype": "fp32",
}
_SWITCHES = (
    "sequence-parallel",
    "fp16",
    "bf16",
    "group-query-attention",
    "multi-latent-attention",
    "disable-bias-linear",
    "add-qkv-bias",
    "qk-layernorm",
    "attention-output-gate",
    "swiglu",
    "quick-geglu",
    "untie-embeddings-and-output-weights",
    "use-rotary-position-embeddings",
    "no-pad-vocab-size",
    "disable-pad-vocab-size",
    "moe-shared-expert-gate",
    "moe-layer-recompute",
    "mtp-use-repeated-layer",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "recompute-activations",
    "use-distributed-optimizer",
    "use-precision-aware-optimizer",
    "accumulate-allreduce-grads-in-fp32",
)

_LEFT_OUT = {
    "another model than the flags say": (
        "spec", "yaml-cfg", "hybrid-layer-pattern", "hybrid-override-pattern", "is-hybrid-model",
        "mtp-hybrid-override-pattern", "heterogeneous-layers-config-path",
        "heterogeneous-layers-config-encoded-json", "linear-attention-freq", "decoder-num-layers",
        "use-checkpoint-args", "use-mp-args-from-checkpoint-args", "moe-use-upcycling",
        "vision-pretraining", "mtp-standalone",
    ),
    "other memory": (
        "use-megatron-fsdp", "use-torch-fsdp2", "optimizer-cpu-offload",
        "cpu-offloading-num-layers", "fine-grained-activation-offloading", "moe-paged-stash",
        "distribute-saved-activations", "num-distributed-optimizer-instances",
        "tensor-parallel-num-weight-shards", "expert-tensor-parallel-num-weight-shards",
        "fp8-param-gather", "fp4-param-gather",
    ),
    "other speed": (
        "fp8-format", "fp4-format", "moe-expert-capacity-factor",
        "moe-expert-rank-capacity-factor", "moe-pad-expert-input-to-capacity",
        "dsa-indexer-topk-freq", "dsa-indexer-skip-topk-offset", "freeze-all-layers",
        "mtp-detach-heads", "reset-attention-mask", "dataloader-inter-document-masking", "sft",
        "hybrid-context-parallel",
    ),
    "another schedule": (
        "microbatch-group-size-per-virtual-pipeline-stage", "overlap-moe-expert-parallel-comm",
        "delay-wgrad-compute", "defer-embedding-wgrad-compute", "rampup-batch-size",
        "step-batch-size-schedule",
    ),
}  # fmt: skip
LEFT_OUT = {f"--{name}": why for why, names in _LEFT_OUT.items() for name in names}

# Flags that look like a part of the model; one that is in no list may be of a fork of Megatron.
MODEL_FLAG = re.compile(
    r"--(moe|mla|mamba|mtp|dsa|linear|hybrid|heterogeneous|num-(layers|attention|query|experts|"
    r"heads|kv)|hidden-size|ffn|kv-|qk-|q-lora|v-head|window|sliding|attention-output|encoder-num|"
    r"decoder-num|vocab-size|padded-vocab|shared|experimental-attention|is-hybrid|spec|expert-|"
    r"router-|head-dim|intermediate)"
)
HARMLESS = re.compile(
    r"--(moe-(router-(padding|num-groups|group-topk|pre-softmax|topk-scaling|score|dtype|enable|"
    r"bias|quantile|force|fusion|load-balancing)|enable|grouped-gemm|single-grouped|z-loss|"
    r"aux-loss|input-jitter|token-d|flex|permute|hybridep|per-layer|pad-experts|apply-probs|"
    r"deepep|ncclep|mlp-glu|paged-stash-|routing-trace|shared-expert-(overlap|glu)|"
    r"upcycling-granularity)|qk-(clip|l2-norm)|dsa-(kernel|indexer-(loss|use-sparse|rope|k-norm))|"
    r"linear-(conv|key|value|num)|mamba-|mtp-loss|num-layers-at|mla-down-proj-fusion)"
)


class _Parser(argparse.ArgumentParser):
    """Answers mistakes with a ConfigError of one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"Megatron's arguments: {message}")


def parse_flags(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read what the planner understands of a Megatron command line.

    Args:
        words: the arguments, in any order; of a flag given twice the last wins. Words that are no
            known flag (a launcher, a script, other flags with their values) may be among them.

    Returns:
        (values by Megatron's names, words that were not read).

    Raises:
        ConfigError: a value that is no number, say, or a flag without its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, default in _NUMBERS.items():
        kind = float if isinstance(default, float) else int
        parser.add_argument(f"--{name}", type=kind, default=default)
    for name, text in _TEXTS.items():
        parser.add_argument(f"--{name}", default=text)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--recompute-modules", nargs="+", default=None)
    return parser.parse_known_args(list(words))


def unread_flags(words: Sequence[str]) -> list[str]:
    """One warning for each flag among unread words that may change what the plan models."""
    names = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    warnings = []
    for name in names:
        if name in LEFT_OUT:
            warnings.append(f"{name} means {LEFT_OUT[name]}, which this plan does not model")
        elif MODEL_FLAG.match(name) and not HARMLESS.match(name):
            warnings.append(f"{name} is unknown here and may change the model; it is left out")
    return warnings


def parse_pattern(text: str, flag: str, num_layers: int) -> list[int] | int:
    """A number, or a list written with + and *, such as ([0]*3+[1]*58).

    Args:
        text: what was typed.
        flag: for the message.
        num_layers: length that a list must have.

    Raises:
        ConfigError: neither of them, or a list of another length.
    """
    if "[" not in text:
        try:
            number = int(text)
        except ValueError as error:
            raise ConfigError(f"{flag} {text!r}: a number or a list is needed") from error
        if number < 1:
            raise ConfigError(f"{flag} {number}: at least 1 is needed")
        return number
    # Megatron refuses blanks, so a line that works here must have none.
    if re.search(r"[^,\d\[\]()+*]", text):
        raise ConfigError(
            f"{flag} {text!r}: Megatron takes digits, commas, brackets, + and * without blanks, "
            "for example ([0]*3+[1]*58)"
        )
    try:
        values = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{flag} {text!r} is no list, for example ([0]*3+[1]*58)") from error
    if not isinstance(values, list) or any(value not in (0, 1) for value in values):
        raise ConfigError(f"{flag} {text!r} must be a list of 0 and 1")
    if len(values) != num_layers:
        raise ConfigError(
            f"{flag} {text!r} describes {len(values)} of {num_layers} layers: they must agree"
        )
    return values


def _evaluate(node: ast.expr) -> Any:
    """Value of a list expression; nothing but lists, numbers, + and * is evaluated."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=elements):
            return [_evaluate(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            values, times = _evaluate(left), _evaluate(right)
            if isinstance(values, list) and isinstance(times, int):
                if len(values) * times > _MAX_PATTERN:
                    raise ValueError("too long")
                return values * times
    raise ValueError("not a list expression")

"""Under which of a run's features tokens cannot leave early, with the reason and the remedy."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_dynmo.config import DynMoConfig

_GRAPHS = "a captured graph computes a fixed number of tokens"

# (attribute of Megatron's arguments, its neutral values, how the user turned it on, why not)
_FEATURES: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    (
        "context_parallel_size",
        (1,),
        "--context-parallel-size",
        "ranks exchange equal parts of keys and values of a sequence, which tokens leave unevenly",
    ),
    (
        "mtp_num_layers",
        (0,),
        "--mtp-num-layers",
        "multi-token prediction runs on the hidden states of a last layer that all tokens passed",
    ),
    (
        "num_experts",
        (),
        "--num-experts",
        "routers balance over all tokens, and tokens that have left would unbalance them",
    ),
    (
        "multi_latent_attention",
        (),
        "--multi-latent-attention",
        "keys and values of tokens that have left would need its two-step projection",
    ),
    (
        "experimental_attention_variant",
        (),
        "--experimental-attention-variant",
        "only Megatron's own self attention is run on some of the tokens",
    ),
    (
        "hybrid_layer_pattern",
        (),
        "--hybrid-layer-pattern",
        "a state-space layer passes every token through its state",
    ),
    ("window_size", (), "--window-size", "only plain causal attention is run on some tokens"),
    (
        "softmax_type",
        ("vanilla",),
        "--softmax-type",
        "only the plain softmax is run on some of the tokens",
    ),
    (
        "attention_output_gate",
        (),
        "--attention-output-gate",
        "only attention without a gate is run on some of the tokens",
    ),
    (
        "heterogeneous_layers_config_path",
        (),
        "--heterogeneous-layers-config-path",
        "layers without attention or MLP have no parts to run on some of the tokens",
    ),
    (
        "heterogeneous_layers_config_encoded_json",
        (),
        "--heterogeneous-layers-config-encoded-json",
        "layers without attention or MLP have no parts to run on some of the tokens",
    ),
    (
        "fp32_residual_connection",
        (),
        "--fp32-residual-connection",
        "tokens that have left would go on in another precision than they had",
    ),
    ("fp8", (), "--fp8-format", "scales of a layer would depend on who has left"),
    ("fp4", (), "--fp4-format", "scales of a layer would depend on who has left"),
    ("sft", (), "--sft", "packed sequences have no column of tokens for each sample"),
    (
        "dataloader_inter_document_masking",
        (),
        "--dataloader-inter-document-masking",
        "packed sequences have no column of tokens for each sample",
    ),
    ("cuda_graph_impl", ("none",), "--cuda-graph-impl", _GRAPHS),
    ("enable_cuda_graph", (), "--enable-cuda-graph", _GRAPHS),
    ("external_cuda_graph", (), "--external-cuda-graph", _GRAPHS),
    (
        "overlap_moe_expert_parallel_comm",
        (),
        "--overlap-moe-expert-parallel-comm",
        "its schedule runs parts of layers without the layer",
    ),
    (
        "fine_grained_activation_offloading",
        (),
        "--fine-grained-activation-offloading",
        "offloaded activations are expected in a fixed size",
    ),
    (
        "cpu_offloading_num_layers",
        (0,),
        "--cpu-offloading-num-layers",
        "offloaded activations are expected in a fixed size",
    ),
)

_CONFLICTS = {
    "mixture_of_depths": "both choose which tokens a layer computes",
}


def refusals(config: DynMoConfig, args: Namespace) -> list[str]:
    """See `Dynamic.refusals`."""
    found = [
        f"{flag}: {reason}; leave {flag} or --dynmo-early-exit out"
        for name, neutral, flag, reason in _FEATURES
        if getattr(args, name, None) not in (None, False, *neutral)
    ]
    found += [
        f"{kind} is on too: {reason}; use one of them"
        for kind, reason in _CONFLICTS.items()
        if kind in config.dynamics
    ]
    found += [text for check in (_implementation, _rotary, _depth) if (text := check(config, args))]
    return found


def _implementation(config: DynMoConfig, args: Namespace) -> str | None:
    if getattr(args, "transformer_impl", "local") == "local":
        return None
    return (
        f"--transformer-impl {args.transformer_impl} fuses the parts of a layer that tokens which "
        "have left still need with those they do not; use --transformer-impl local"
    )


def _rotary(config: DynMoConfig, args: Namespace) -> str | None:
    if getattr(args, "position_embedding_type", None) != "mrope":
        return None
    return (
        "--position-embedding-type mrope turns each sample's tokens by other angles; use rope or "
        "learned_absolute"
    )


def _depth(config: DynMoConfig, args: Namespace) -> str | None:
    num_layers, first = args.num_layers, config.early_exit_min_layer
    if num_layers and (num_layers < 2 or (first is not None and first >= num_layers)):
        return (
            f"--dynmo-early-exit-min-layer {first or 1} of {num_layers} layers leaves no layer to "
            "save; choose a smaller one"
        )
    return None

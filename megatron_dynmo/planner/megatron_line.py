"""The model, its training and its layout from a Megatron command line, without Megatron."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dynmo.errors import ConfigError, LayoutError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.planner.layers import (
    Attention,
    DenseMlp,
    GroupedAttention,
    Indexer,
    LatentAttention,
    Layer,
    MoeMlp,
)
from megatron_dynmo.planner.megatron_flags import parse_flags, parse_pattern, unread_flags
from megatron_dynmo.planner.megatron_setup import read_setup
from megatron_dynmo.planner.model import Model, padded_vocab_size
from megatron_dynmo.planner.setup import Setup

__all__ = ["Planned", "read_line"]

_ROTARY = ("rope", "yarn", "mrope", "none")


@dataclass(frozen=True)
class Planned:
    """What a Megatron command line says.

    Attributes:
        model: the model, its vocabulary padded.
        setup: how it is trained.
        num_stages: pipeline-parallel size.
        virtual_stages: chunks on each rank.
        current: the layout that the line asks for; None if it leaves it to Megatron's even split
            or speaks of another pipeline than is planned.
        notes: assumptions behind the numbers.
        warnings: flags that are not understood, and splits that Megatron refuses.
    """

    model: Model
    setup: Setup
    num_stages: int
    virtual_stages: int
    current: LayerLayout | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def read_line(
    words: Sequence[str],
    *,
    card: Model | None = None,
    num_stages: int | None = None,
    virtual_stages: int | None = None,
    num_microbatches: int | None = None,
    world_size: int | None = None,
) -> Planned:
    """Read a model and its training from Megatron's arguments.

    Args:
        words: the arguments.
        card: the model if another file describes it, its vocabulary not padded.
        num_stages: pipeline-parallel size to plan for; that of the line if None.
        virtual_stages: chunks on each rank; those of the line if None.
        num_microbatches: micro-batches of an iteration; from the line's batch sizes if None.
        world_size: ranks of the job; the fewest possible if None.

    Raises:
        ConfigError: something is missing, contradicts or cannot be; says what to change.
        LayoutError: the line's layout is not legal.
    """
    args, unread = parse_flags(words)
    stages = num_stages or args.pipeline_model_parallel_size
    if stages is None:
        raise ConfigError("the number of stages is missing: give --stages P")
    if min(stages, virtual_stages or 1) < 1:
        raise ConfigError(f"{stages} stages x {virtual_stages or 1} chunks: at least 1 is needed")
    notes: list[str] = []
    warnings = unread_flags(unread)
    if card is None:
        model = _model(args, warnings)
    elif args.num_layers is None and args.hidden_size is None:
        model = card
    else:
        raise ConfigError(
            "the model is described twice: leave out --model, or --num-layers, --hidden-size and "
            "the like behind --"
        )
    model = _with_padded_vocab(model, args, notes)
    virtual, current = _layout(args, model, stages, virtual_stages, warnings)
    setup = read_setup(
        args, stages, virtual, model, num_microbatches=num_microbatches, world_size=world_size,
        notes=notes, warnings=warnings,
    )  # fmt: skip
    return Planned(model, setup, stages, virtual, current, tuple(notes), tuple(warnings))


# -------------------------------------------------------------------- the model


def _model(args: argparse.Namespace, warnings: list[str]) -> Model:
    num_layers = args.num_layers or args.encoder_num_layers
    hidden = _required(args, "hidden_size")
    if not num_layers or num_layers < 1:
        raise ConfigError("the line has no --num-layers N with N of at least 1")
    gated = args.swiglu or args.quick_geglu
    bias = not args.disable_bias_linear
    moe = _moe_layers(args, num_layers)
    ffn = args.ffn_hidden_size or (int(8 * hidden / 3 / 64) * 64 if args.swiglu else 4 * hidden)
    dense = DenseMlp(ffn, gated, bias)
    experts = None
    if any(moe):
        experts = MoeMlp(
            args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size or ffn,
            shared_ffn=args.moe_shared_expert_intermediate_size or 0, gated=gated, bias=bias,
            shared_gate=args.moe_shared_expert_gate, latent=args.moe_latent_size,
        )  # fmt: skip
    layers = tuple(
        Layer(attention, experts if experts is not None and is_moe else dense)
        for attention, is_moe in zip(_attentions(args, num_layers, warnings), moe, strict=True)
    )
    return Model(
        hidden=hidden,
        layers=layers,
        vocab_size=args.padded_vocab_size or args.vocab_size or 0,
        tied=not args.untie_embeddings_and_output_weights,
        norm_size=1 if args.normalization == "RMSNorm" else 2,
        learned_positions=_learned_positions(args, warnings),
        mtp_layers=args.mtp_num_layers or 0,
        mtp_shared=args.mtp_use_repeated_layer,
    )


def _moe_layers(args: argparse.Namespace, num_layers: int) -> list[bool]:
    if not args.num_experts:
        return [False] * num_layers
    pattern = parse_pattern(args.moe_layer_freq, "--moe-layer-freq", num_layers)
    if isinstance(pattern, int):
        return [index % pattern == 0 for index in range(num_layers)]
    return [bool(value) for value in pattern]


def _attentions(args: argparse.Namespace, num_layers: int, warnings: list[str]) -> list[Attention]:
    heads = _required(args, "num_attention_heads")
    variant = args.experimental_attention_variant
    if variant not in (None, "dsa"):
        warnings.append(
            f"--experimental-attention-variant {variant} is not modelled: its layers are taken for "
            "ordinary attention"
        )
    if args.multi_latent_attention:
        return [_latent(args, heads, variant == "dsa")] * num_layers
    groups = args.num_query_groups if args.group_query_attention else heads
    if groups < 1 or heads % groups:
        raise ConfigError(f"{heads} heads do not divide into {groups} query groups")
    if args.kv_channels is None and args.hidden_size % heads:
        raise ConfigError(
            f"hidden size {args.hidden_size} does not divide over {heads} heads: add --kv-channels"
        )
    bias = not args.disable_bias_linear
    full = GroupedAttention(
        heads, groups, args.kv_channels or args.hidden_size // heads,
        qkv_bias=bias or args.add_qkv_bias, output_bias=bias, qk_norm=args.qk_layernorm,
        output_gate=args.attention_output_gate, sinks=args.softmax_type == "learnable",
    )  # fmt: skip
    window = _window(args)
    if window is None:
        return [full] * num_layers
    windowed = replace(full, window=window)
    return [windowed if one else full for one in _windowed_layers(args, num_layers)]


def _latent(args: argparse.Namespace, heads: int, sparse: bool) -> LatentAttention:
    if args.group_query_attention:
        raise ConfigError("--multi-latent-attention and --group-query-attention exclude each other")
    indexer = None
    if sparse:
        names = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
        indexer = Indexer(*(_required(args, name) for name in names))
    return LatentAttention(
        heads, args.q_lora_rank, args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim,
        args.v_head_dim, qk_norm=args.qk_layernorm, output_bias=not args.disable_bias_linear,
        indexer=indexer,
    )  # fmt: skip


def _window(args: argparse.Namespace) -> int | None:
    """Tokens visible in a window, the query's own included: Megatron's left size and one."""
    if args.window_size is None:
        return None
    try:
        left, _ = (int(part) for part in args.window_size.strip("()").split(","))
    except ValueError as error:
        raise ConfigError(
            f"--window-size {args.window_size}: two numbers are needed, for example 127,0 for 128 "
            "tokens"
        ) from error
    return None if left < 0 else left + 1


def _windowed_layers(args: argparse.Namespace, num_layers: int) -> list[bool]:
    if args.window_attn_skip_freq is None:
        return [True] * num_layers
    flag = "--window-attn-skip-freq"
    pattern = parse_pattern(args.window_attn_skip_freq, flag, num_layers)
    if isinstance(pattern, int):
        return [number % pattern != 0 for number in range(1, num_layers + 1)]
    return [bool(value) for value in pattern]


def _learned_positions(args: argparse.Namespace, warnings: list[str]) -> int:
    kind = "rope" if args.use_rotary_position_embeddings else args.position_embedding_type
    if kind == "learned_absolute":
        return _required(args, "max_position_embeddings")
    if kind not in _ROTARY:
        warnings.append(f"--position-embedding-type {kind}: its parameters are not counted")
    return 0


def _with_padded_vocab(model: Model, args: argparse.Namespace, notes: list[str]) -> Model:
    if model.vocab_size < 1:
        raise ConfigError(
            "the vocabulary is unknown, for tokenizers are not read: add --vocab-size N behind --"
        )
    given = args.padded_vocab_size or args.no_pad_vocab_size or args.disable_pad_vocab_size
    if given:
        return model
    padded = padded_vocab_size(
        model.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    if padded != model.vocab_size:
        notes.append(f"vocabulary {model.vocab_size:,} is padded to {padded:,}, as Megatron does")
    return replace(model, vocab_size=padded)


# -------------------------------------------------------------------- the layout


def _layout(
    args: argparse.Namespace,
    model: Model,
    num_stages: int,
    virtual_stages: int | None,
    warnings: list[str],
) -> tuple[int, LayerLayout | None]:
    """(virtual stages, the layout that the line asks for)."""
    own = args.pipeline_model_parallel_size or num_stages
    if own != num_stages:
        warnings.append(
            f"the line has {own} pipeline stages, planned are {num_stages}; its layout is left out"
        )
        return virtual_stages or 1, None
    layout = _own_layout(args, model, num_stages, warnings)
    virtual = virtual_stages or (
        layout.virtual_stages if layout else _own_virtual(args, model, own)
    )
    return virtual, layout if layout and layout.virtual_stages == virtual else None


def _own_layout(
    args: argparse.Namespace, model: Model, num_stages: int, warnings: list[str]
) -> LayerLayout | None:
    """The layout that the line's flags name; None if they name none, or none that works."""
    text = args.pipeline_model_parallel_layout
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    ends = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    if sum((text is not None, first is not None or last is not None, any(ends))) > 1:
        raise ConfigError(
            "the split is given more than once: use one of --pipeline-model-parallel-layout, "
            "--decoder-first/last-pipeline-num-layers and --account-for-*-in-pipeline-split"
        )
    if text is not None:
        return LayerLayout.from_megatron(text, num_layers=model.num_layers, num_stages=num_stages)
    virtual = _own_virtual(args, model, num_stages)
    if first is not None or last is not None:
        layout = LayerLayout.first_last(
            model.num_layers, num_stages, first_num_layers=first, last_num_layers=last,
            virtual_stages=virtual,
        )  # fmt: skip
        bounds = layout.boundaries
    elif any(ends):
        chunks = num_stages * virtual
        even = LayerLayout.even(model.num_layers + sum(ends), num_stages, virtual_stages=virtual)
        bounds = [max(b - ends[0], 0) for b in even.boundaries]
        bounds[chunks] = model.num_layers
    else:
        try:
            bounds = LayerLayout.even(
                model.num_layers, num_stages, virtual_stages=virtual
            ).boundaries
        except LayoutError:
            warnings.append(
                f"Megatron refuses to split {model.num_layers} layers evenly over "
                f"{num_stages * virtual} chunks; a layout is needed"
            )
            return None
    return LayerLayout.from_boundaries(
        bounds, num_stages=num_stages, virtual_stages=virtual, mtp_num_layers=model.mtp_layers
    )


def _own_virtual(args: argparse.Namespace, model: Model, num_stages: int) -> int:
    if args.num_virtual_stages_per_pipeline_rank:
        return int(args.num_virtual_stages_per_pipeline_rank)
    if args.num_layers_per_virtual_pipeline_stage:
        chunk = args.num_layers_per_virtual_pipeline_stage
        return max(1, math.ceil(model.num_layers / (num_stages * chunk)))
    return 1


def _required(args: argparse.Namespace, name: str) -> int:
    value = getattr(args, name)
    if value is None or value < 1:
        flag = name.replace("_", "-")
        found = "no" if value is None else f"{value} as"
        raise ConfigError(f"the line has {found} --{flag}: a number of at least 1 is needed")
    return int(value)

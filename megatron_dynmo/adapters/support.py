"""What cannot be moved, by name, with the reason and the remedy.

Read from Megatron's arguments right after they are parsed, so that a run which could not keep its
promise ends before it has cost anything.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_dynmo.errors import ConfigError, LayoutError
from megatron_dynmo.layout import LayerLayout

REMEDY = "use --dynmo-mode observe to measure only, or leave the feature out"


@dataclass(frozen=True)
class Unsupported:
    """One feature under which layers cannot be moved.

    Attributes:
        flag: how the user turned it on.
        is_on: tells from Megatron's arguments.
        reason: what a move would break.
    """

    flag: str
    is_on: Callable[[Namespace], Any]
    reason: str


def _set(name: str, *off: Any) -> Callable[[Namespace], bool]:
    """Whether an argument exists and has none of its neutral values."""
    neutral = (None, False, *off)
    return lambda args: getattr(args, name, None) not in neutral


def _shards_weights(args: Namespace) -> bool:
    """Whether weights are cut finer than by tensor parallelism, before or after validation."""
    shards = getattr(args, "tensor_parallel_num_weight_shards", None)
    tp_size = getattr(args, "tensor_model_parallel_size", 1)
    return getattr(args, "gtp_weight_remat_size", 1) > 1 or (shards or tp_size) > tp_size


def _has_unknown_optimizer(args: Namespace) -> bool:
    known = (
        ("adam", "sgd", None)
        if _set("use_distributed_optimizer")(args)
        else ("adam", "sgd", "muon", None)
    )
    return getattr(args, "optimizer", None) not in known


UNSUPPORTED = (
    Unsupported(
        "--cuda-graph-impl",
        _set("cuda_graph_impl", "none"),
        "captured graphs hold the addresses of the layers they were captured with",
    ),
    Unsupported(
        "--enable-cuda-graph",
        _set("enable_cuda_graph"),
        "captured graphs hold the addresses of the layers they were captured with",
    ),
    Unsupported(
        "--external-cuda-graph",
        _set("external_cuda_graph"),
        "captured graphs hold the addresses of the layers they were captured with",
    ),
    Unsupported(
        "--optimizer-cuda-graph",
        _set("optimizer_cuda_graph"),
        "the captured optimizer step holds the addresses of its parameters",
    ),
    Unsupported(
        "--use-megatron-fsdp",
        _set("use_megatron_fsdp"),
        "Megatron-FSDP keeps parameters and optimizer state in buffers of its own",
    ),
    Unsupported(
        "--use-torch-fsdp2",
        _set("use_torch_fsdp2"),
        "FSDP2 keeps parameters as DTensors of its own",
    ),
    Unsupported(
        "--cpu-offloading-num-layers",
        _set("cpu_offloading_num_layers", 0),
        "offloading hooks are bound to the layers a rank had at the start",
    ),
    Unsupported(
        "--fine-grained-activation-offloading",
        _set("fine_grained_activation_offloading"),
        "offloading keeps a schedule per layer that is fixed at the start",
    ),
    Unsupported(
        "--optimizer-cpu-offload",
        _set("optimizer_cpu_offload"),
        "part of the optimizer's state lives in host copies that a move would leave behind",
    ),
    Unsupported(
        "--ckpt-assume-constant-structure",
        _set("ckpt_assume_constant_structure"),
        "Megatron then reuses the first save plan, which names layers that have moved since",
    ),
    Unsupported(
        "--delay-wgrad-compute",
        _set("delay_wgrad_compute"),
        "its hooks stay on modules when the wrapper is rebuilt, and gradients would count twice",
    ),
    Unsupported(
        "--overlap-moe-expert-parallel-comm",
        _set("overlap_moe_expert_parallel_comm"),
        "its schedule runs parts of layers, so that no layer can be timed",
    ),
    Unsupported(
        "--moe-routing-trace-path",
        _set("moe_routing_trace_path"),
        "its hooks are bound to the routers of the start",
    ),
    Unsupported(
        "--use-nccl-ub",
        _set("nccl_ub"),
        "registered buffers would be registered again with every move",
    ),
    Unsupported(
        "--tensor-parallel-num-weight-shards",
        _shards_weights,
        "chains of sharded weights are made once, for the layers of the start",
    ),
    Unsupported(
        "--use-precision-aware-optimizer",
        _set("use_precision_aware_optimizer"),
        "master weights live inside the fused optimizer in a scaled form",
    ),
    Unsupported(
        "--fp8-param-gather",
        _set("fp8_param_gather"),
        "quantized parameters are no plain tensors that could travel",
    ),
    Unsupported(
        "--fp4-param-gather",
        _set("fp4_param_gather"),
        "quantized parameters are no plain tensors that could travel",
    ),
    Unsupported(
        "--optimizer",
        _has_unknown_optimizer,
        "only the state of Adam, SGD and, without --use-distributed-optimizer, Muon is known how "
        "to be moved: with it Muon deals whole matrices out to data-parallel ranks by all that a "
        "stage holds",
    ),
    Unsupported(
        "--overlap-param-gather-with-optimizer-step",
        _set("overlap_param_gather_with_optimizer_step"),
        "parameters are still on their way when the iteration ends",
    ),
    Unsupported(
        "--moe-enable-routing-replay",
        _set("moe_enable_routing_replay"),
        "replayed routes are kept in a list by position on the rank",
    ),
    Unsupported(
        "--moe-expert-rank-capacity-factor",
        _set("moe_expert_rank_capacity_factor"),
        "overflow of experts is looked for in the layers a rank had at the start, so a moved one "
        "would drop tokens unnoticed",
    ),
    Unsupported(
        "--freeze-all-layers",
        _set("freeze_all_layers"),
        "the freeze of expert biases is no state of a layer, and a moved one would train them",
    ),
    Unsupported(
        "--moe-paged-stash",
        _set("moe_paged_stash"),
        "the activation stash is laid out for the layers a rank had at the start",
    ),
    Unsupported(
        "--inprocess-restart",
        _set("inprocess_restart"),
        "a restart inside the process would build the layout of the start",
    ),
    Unsupported(
        "--hybrid-layer-pattern",
        _set("hybrid_layer_pattern"),
        "hybrid models number and build their layers themselves",
    ),
    Unsupported(
        "--logits-load-dir",
        _set("logits_load_dir"),
        "distillation hooks are bound to the modules of the start",
    ),
    Unsupported(
        "--perform-rl-step",
        _set("perform_rl_step"),
        "a second model for inference would keep the old layout",
    ),
)


def refusals(args: Namespace) -> list[Unsupported]:
    """Return the features in use under which no layer can be moved."""
    return [feature for feature in UNSUPPORTED if feature.is_on(args)]


def require_movable(args: Namespace) -> None:
    """Refuse a run whose layers cannot be moved.

    Raises:
        ConfigError: Names every such feature with its reason.
    """
    found = refusals(args)
    if found:
        listed = "; ".join(f"{feature.flag}: {feature.reason}" for feature in found)
        raise ConfigError(f"--dynmo-mode balance cannot move layers with {listed}. {REMEDY}")


def require_legal_split(args: Namespace) -> LayerLayout | None:
    """Refuse a split of the layers that Megatron would drop layers from or stop at, and offer one.

    Returns:
        The split; None with one stage, and where it is left to Megatron's own arithmetic.

    Raises:
        LayoutError: Layers do not divide over the stages; the text offers a layout that works.
    """
    stages = args.pipeline_model_parallel_size
    if stages < 2 or getattr(args, "hybrid_layer_pattern", None) or not args.num_layers:
        return None
    if args.pipeline_model_parallel_layout is not None:
        _refuse_second_way(args)
        return LayerLayout.from_megatron(
            args.pipeline_model_parallel_layout,
            num_layers=args.num_layers,
            num_stages=stages,
        )
    if args.account_for_embedding_in_pipeline_split or args.account_for_loss_in_pipeline_split:
        return None  # Megatron's own arithmetic and message
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    virtual = _virtual_stages(args, stages)
    if virtual is None:
        return None
    if first is not None or last is not None:
        return LayerLayout.first_last(
            args.num_layers,
            stages,
            first_num_layers=first,
            last_num_layers=last,
            virtual_stages=virtual,
        )
    return LayerLayout.even(args.num_layers, stages, virtual_stages=virtual)


def _refuse_second_way(args: Namespace) -> None:
    """Refuse a split that is given twice, in ways that may contradict each other."""
    others = [
        f"--{name.replace('_', '-')}"
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
        )
        if (value := getattr(args, name, None)) is not None and value is not False
    ]
    if others:
        raise LayoutError(
            f"--pipeline-model-parallel-layout '{args.pipeline_model_parallel_layout}' says which "
            f"layers every stage has, so {', '.join(others)} cannot stand beside it; drop either"
        )


def _virtual_stages(args: Namespace, stages: int) -> int | None:
    """Chunks a rank, as Megatron will derive them; None when it will refuse the numbers itself."""
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return int(args.num_virtual_stages_per_pipeline_rank)
    each = args.num_layers_per_virtual_pipeline_stage
    if each is None:
        return 1
    if args.num_layers % (stages * each):
        raise LayoutError(
            f"{args.num_layers} layers on {stages} stages in chunks of {each}: "
            f"{args.num_layers % (stages * each)} layers would be left over; use "
            "--pipeline-model-parallel-layout with "
            f"'{LayerLayout.nearly_even(args.num_layers, stages, virtual_stages=2).to_megatron()}'"
        )
    return int(args.num_layers // (stages * each))

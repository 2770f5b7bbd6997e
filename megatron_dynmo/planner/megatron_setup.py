"""Parallelism, batch, precision and recompute from Megatron's arguments."""

from __future__ import annotations

import argparse
import math

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.planner.model import Model
from megatron_dynmo.planner.setup import Precision, Recompute, Setup

__all__ = ["MICROBATCHES_PER_STAGE", "read_setup"]

MICROBATCHES_PER_STAGE = 4
_DEFAULT_SEQ_LENGTH = 4096
_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}


def read_setup(
    args: argparse.Namespace,
    num_stages: int,
    virtual_stages: int,
    model: Model,
    *,
    num_microbatches: int | None,
    world_size: int | None,
    notes: list[str],
    warnings: list[str],
) -> Setup:
    """How the model is trained.

    Args:
        args: what `parse_flags` read.
        num_stages: pipeline-parallel size.
        virtual_stages: chunks on each rank.
        model: the model.
        num_microbatches: micro-batches of an iteration; from the batch sizes if None.
        world_size: ranks of the job; the fewest possible if None.
        notes: assumptions are added to it.
        warnings: what is not understood is added to it.

    Raises:
        ConfigError: sizes that do not go together; says which.
    """
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    expert = args.expert_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    if not any(hasattr(layer.mlp, "num_experts") for layer in model.layers):
        expert, expert_tensor = 1, tensor
    if min(tensor, context, expert, expert_tensor) < 1:
        raise ConfigError("parallel sizes must be at least 1")
    data = _data_parallel(num_stages, tensor * context, expert * expert_tensor, world_size, notes)
    micro = args.micro_batch_size or 1
    if args.micro_batch_size is None:
        notes.append("micro-batch size 1")
    seq_length = args.seq_length or args.encoder_seq_length
    if seq_length is None:
        seq_length = _DEFAULT_SEQ_LENGTH
        notes.append(f"sequence length {seq_length:,}; give --seq-length behind -- for another")
    if min(micro, seq_length) < 1:
        raise ConfigError(f"micro-batch of {micro} x {seq_length} tokens: at least 1 is needed")
    return Setup(
        tensor_parallel=tensor,
        context_parallel=context,
        expert_parallel=expert,
        expert_tensor_parallel=expert_tensor,
        data_parallel=data,
        sequence_parallel=args.sequence_parallel,
        seq_length=seq_length,
        micro_batch_size=micro,
        num_microbatches=num_microbatches or _microbatches(args, num_stages, micro, data, notes),
        precision=_precision(args, warnings),
        distributed_optimizer=args.use_distributed_optimizer,
        recompute=_recompute(args, model.num_layers / (num_stages * virtual_stages), notes),
        dropout=args.hidden_dropout > 0,
        fused_attention=args.transformer_impl != "local"
        and args.attention_backend not in ("unfused", "local"),
    )


def _data_parallel(
    num_stages: int, dense: int, expert: int, world_size: int | None, notes: list[str]
) -> int:
    """Copies of the model; dense and expert are ranks that share one copy of either kind."""
    fewest = math.lcm(dense, expert) // dense
    if world_size is None:
        notes.append(
            f"the job has {num_stages * dense * fewest} ranks, {fewest} data-parallel; give "
            "--world-size for more"
        )
        return fewest
    if world_size < 1 or world_size % (num_stages * dense * fewest):
        raise ConfigError(
            f"--world-size {world_size} is no multiple of {num_stages * dense * fewest}: "
            f"{num_stages} stages x {dense} ranks of tensor and context parallelism x {fewest} "
            "for the experts"
        )
    return world_size // (num_stages * dense)


def _microbatches(
    args: argparse.Namespace, num_stages: int, micro: int, data: int, notes: list[str]
) -> int:
    if args.global_batch_size is None:
        number = MICROBATCHES_PER_STAGE * num_stages
        notes.append(f"{number} micro-batches, 4 for each stage; give --microbatches for another")
        return number
    number, left = divmod(args.global_batch_size, micro * data)
    if left or number < 1:
        raise ConfigError(
            f"global batch {args.global_batch_size} does not divide into micro-batches of {micro} "
            f"on {data} data-parallel ranks; use a multiple of {micro * data}, or give "
            "--world-size if there are other ranks"
        )
    return number


def _precision(args: argparse.Namespace, warnings: list[str]) -> Precision:
    half = args.bf16 or args.fp16
    kinds = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    unknown = [kind for kind in kinds if getattr(args, kind) not in _BYTES]
    if unknown:
        raise ConfigError(f"{unknown[0]} is {getattr(args, unknown[0])}: no such number format")
    gradient, main, first, second = (
        _BYTES[getattr(args, kind)] if args.use_precision_aware_optimizer else 4.0 for kind in kinds
    )
    if args.fp16 and not args.accumulate_allreduce_grads_in_fp32:
        gradient = 2.0
    if args.optimizer == "sgd":
        first, second = (4.0 if args.sgd_momentum else 0.0), 0.0
    elif args.optimizer != "adam":
        warnings.append(f"--optimizer {args.optimizer}: its memory is taken for that of Adam")
    return Precision(2.0 if half else 4.0, gradient, (main if half else 0.0) + first + second)


def _recompute(args: argparse.Namespace, chunk_layers: float, notes: list[str]) -> Recompute:
    modules = frozenset(args.recompute_modules or ("core_attn",))
    granularity = args.recompute_granularity
    if args.recompute_activations:
        granularity = granularity or "selective"
    if granularity == "full":
        number = args.recompute_num_layers or 1
        if args.recompute_method != "block":
            return Recompute(full_share=1.0, group=number)
        share = min(1.0, number / chunk_layers)
        if share < 1.0:
            notes.append(f"{share:.0%} of every layer recomputed, for block recompute of {number}")
        return Recompute(full_share=share)
    if granularity == "selective":
        return Recompute(modules | {"moe"} if args.moe_layer_recompute else modules)
    if granularity is not None:
        raise ConfigError(f"--recompute-granularity {granularity}: full or selective is needed")
    return Recompute(frozenset({"moe"}) if args.moe_layer_recompute else frozenset())

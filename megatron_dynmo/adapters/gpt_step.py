"""One micro-batch of GPT: fetch it, run the model, reduce the losses.

Gives the same numbers, in the same order of operations, as `pretrain_gpt.py@core_v0.19.0`, so that
printed losses agree bit for bit. The data sets are in `gpt_data.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_dynmo.adapters import modelopt
from megatron_dynmo.adapters.gpt_stages import has_mtp_layers

# A loss this many times the largest one seen so far is reported as spiky.
_SPIKY_LOSS_FACTOR = 10

LossAndReport = tuple[Tensor, Tensor, dict[str, Tensor]]

_straggler_timer = StragglerDetector()


class Batch(NamedTuple):
    """What one micro-batch brings to this rank; None where the rank does not need it.

    Unpacks in Megatron's order. b = micro-batch size, s = sequence length on this context-parallel
    rank; packed sequences have b = 1 and s = micro-batch size times sequence length.

    Attributes:
        attention_mask: bool [b, 1, s, s].
        cu_seqlens: int32 [1, documents + 1], where documents of a packed sequence end.
        cu_seqlens_padded: The same with each document padded for context parallelism.
        hybrid_cp_group: Process group that shares this micro-batch's sequences.
        labels: int64 [b, s].
        local_cp_size: int32 [1], size of `hybrid_cp_group`.
        loss_mask: float32 [b, s].
        max_seqlen: int32 [1], longest document.
        position_ids: int64 [b, s].
        tokens: int64 [b, s].
    """

    attention_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_padded: Tensor | None = None
    hybrid_cp_group: Any = None
    labels: Tensor | None = None
    local_cp_size: Tensor | None = None
    loss_mask: Tensor | None = None
    max_seqlen: Tensor | None = None
    position_ids: Tensor | None = None
    tokens: Tensor | None = None


def get_batch(data_iterator: Iterator[dict[str, Tensor]], vp_stage: int | None = None) -> Batch:
    """Fetch the next micro-batch for this model chunk.

    Args:
        data_iterator: Samples of the data set; read on tensor-parallel rank 0 only.
        vp_stage: Virtual stage of the chunk, None without virtual stages.

    Returns:
        The fields that this stage needs, on the device. A stage between the first and the last
        gets nothing, or only the document boundaries of a packed sequence.

    Collective:
        All ranks of the tensor-parallel group, once per micro-batch.
    """
    args = get_args()
    is_packed = args.sft or args.dataloader_inter_document_masking
    has_mtp = has_mtp_layers(args, vp_stage)
    needs_tokens = is_first_or_last_pipeline_stage(vp_stage) or has_mtp
    if not needs_tokens and not is_packed:
        return Batch()

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch = get_batch_on_this_tp_rank(
        _fetch(data_iterator) if tp_rank == 0 else {},
        has_cu_seqlens=is_packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not needs_tokens:
        return Batch(
            cu_seqlens=batch["cu_seqlens"],
            cu_seqlens_padded=batch["cu_seqlens_padded"],
            max_seqlen=batch["max_seqlen"],
        )
    batch = get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
        # SFT pads its documents for context parallelism; documents of a corpus are not padded.
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )
    return Batch(**{name: batch[name] for name in Batch._fields})


def _fetch(data_iterator: Iterator[dict[str, Tensor]]) -> dict[str, Tensor | None]:
    """Read the next sample and start its copy to the device; other fields of it are dropped."""
    sample = next(data_iterator)
    return {name: _to_device(sample.get(name)) for name in Batch._fields}


def _to_device(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not torch.cuda.is_available():
        return tensor
    return tensor.cuda(non_blocking=True)


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[Tensor], LossAndReport]]:
    """Run one micro-batch through this rank's model chunk.

    Args:
        data_iterator: Samples of the data set.
        model: The chunk, wrapped or not.
        return_schedule_plan: Return the plan of the computation instead of its result, for
            `--overlap-moe-expert-parallel-comm`.

    Returns:
        The chunk's output (on the last stage the loss per token, float32 [b, s]) and the function
        that makes the loss of it.

    Collective:
        As `get_batch`.
    """
    args = get_args()
    timers = get_timers()

    timers("batch-generator", log_level=2).start()
    with _straggler_timer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed_seq_params = _packed_seq_params(batch, args.seq_length)
    timers("batch-generator").stop()

    inputs = (batch.tokens, batch.position_ids, batch.attention_mask)
    targets = {"labels": batch.labels, "loss_mask": batch.loss_mask}
    # Made on every stage, called on the last one only, where the mask is there.
    make_loss = functools.partial(loss_func, cast(Tensor, batch.loss_mask), model=model)
    with _straggler_timer:
        if return_schedule_plan:
            assert args.overlap_moe_expert_parallel_comm, (
                "a schedule plan exists only with --overlap-moe-expert-parallel-comm"
            )
            return model.build_schedule_plan(*inputs, **targets), make_loss
        return model(*inputs, **targets, packed_seq_params=packed_seq_params), make_loss


def _packed_seq_params(batch: Batch, seq_length: int) -> PackedSeqParams | None:
    """Describe the documents of a packed sequence to the attention layers."""
    if batch.cu_seqlens is None:
        return None
    assert batch.max_seqlen is not None
    cu_seqlens = batch.cu_seqlens.squeeze(0)
    padded = batch.cu_seqlens_padded
    padded = padded.squeeze(0) if padded is not None else None
    # The FLOP count is of real tokens, attention is over the padded ones.
    update_seqlen_stats_from_cu_seqlens(cu_seqlens)
    boundaries = cu_seqlens if padded is None else padded
    longest = int(batch.max_seqlen.item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if batch.local_cp_size is None else int(batch.local_cp_size.item()),
        cp_group=batch.hybrid_cp_group,
        tokens_per_sample=seq_length,
    )


def loss_func(loss_mask: Tensor, output_tensor: Tensor, model: Any = None) -> LossAndReport:
    """Reduce the losses of one micro-batch, and have Megatron check the result.

    Args:
        loss_mask: float32 [b, s], 0 where a token does not count.
        output_tensor: Loss per token, [b, s].
        model: The chunk, for distillation losses.

    Returns:
        The summed loss (float32 scalar), the number of tokens that count (int32 scalar), and what
        Megatron logs: `lm loss` as [summed loss, tokens], float32 [2].
    """
    args = get_args()
    if args.logits_load_dir is not None:
        loss, num_tokens, report = _cached_logits_loss()(loss_mask, output_tensor, model=model)
    elif modelopt.is_used(args):
        loss, num_tokens, report = modelopt.loss(loss_mask, output_tensor, model)
    else:
        loss, num_tokens, report = _language_model_loss(loss_mask, output_tensor)
    _check(loss, args.check_for_nan_in_loss_and_grad, args.check_for_spiky_loss)
    return loss, num_tokens, report


def _language_model_loss(loss_mask: Tensor, output_tensor: Tensor) -> LossAndReport:
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    logged = torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": logged}


def _check(loss: Tensor, for_nan: bool, for_spikes: bool) -> None:
    """Hand the loss to Megatron's rerun state machine, which may repeat the step or stop it."""
    machine = get_rerun_state_machine()
    # The forward pass is deterministic, so a repetition must give the very same number.
    if for_nan:
        for name, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            machine.validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if for_spikes:
        machine.validate_result(
            result=loss,
            rejection_func=functools.partial(
                machine.is_unexpectedly_large, threshold=_SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )


@functools.cache
def _cached_logits_loss() -> Callable[..., LossAndReport]:
    """Make the distillation loss from `--logits-load-dir`; one reader per process."""
    from megatron.training.distillation import LossFuncCallable

    args = get_args()
    return LossFuncCallable(
        logprobs_dir=args.logits_load_dir,
        decode_threads=args.logits_load_decode_threads,
        prefetch_factor=args.logits_load_prefetch_factor,
        msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
        kd_loss_alpha=args.logits_load_kd_loss_alpha,
        ignore_errors=args.logits_load_ignore_errors,
    )

"""Patches for frozen layers: nothing is sent, kept or waited for where no gradient goes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dynmo.patches.training import controller
from megatron_dynmo.patching.spec import Kind, PatchSpec


def _freezing() -> Any:
    """The `Freezing` of the run; None before its layers are built."""
    active = controller()
    if active is None or active.dynamics is None:
        return None
    return next(kind for kind in active.dynamics if kind.kind == "freezing")


def _front() -> Any:
    """The run's `FrozenFront`; None before its layers are built."""
    freezing = _freezing()
    return None if freezing is None else freezing.front


class _NothingToWaitFor:
    """Stands where the schedule expects a request."""

    def wait(self) -> None:
        """Return at once."""


def _without_cut_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _communicate(
        self: Any,
        *,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> Any:
        front = _front() if recv_next else None
        is_cut = front is not None and front.cuts_next()
        before, after, requests = original(
            self,
            tensor_send_next=tensor_send_next,
            tensor_send_prev=tensor_send_prev,
            recv_prev=recv_prev,
            recv_next=recv_next and not is_cut,
            tensor_shape=tensor_shape,
            wait_on_reqs=wait_on_reqs,
        )
        if is_cut and isinstance(requests, dict) and not wait_on_reqs:
            requests["recv_next"] = _NothingToWaitFor()
        return before, after, requests

    return _communicate


def _checkpointing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        front = _front()
        if front is None:
            return original(self, *args, **kwargs)
        with front.checkpointing(self):
            return original(self, *args, **kwargs)

    return checkpointed_forward


def _checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
        front = _front()
        if front is None or not args:
            return original(function, distribute_saved_activations, *args)
        with front.checkpoint(args[0]) as hidden:
            return original(function, distribute_saved_activations, hidden, *args[1:])

    return checkpoint


def _frozen_from_the_start(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron_dynmo.patches.layers import dynamics_of_run

        original(self, *args, **kwargs)
        if (dynamics := dynamics_of_run()) is not None:
            dynamics.shape_embedding(self)

    return __init__


def _common_step(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def _extract_common_per_param_step(state_dict: Any) -> Any:
        freezing = _freezing()
        steps = None if freezing is None else freezing.optimizer_steps
        return original(state_dict) if steps is None else torch.tensor(steps)

    return _extract_common_per_param_step


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches that frozen layers need."""
    return (
        PatchSpec(
            name="no-gradient-of-a-frozen-front",
            target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
            kind=Kind.WRAP,
            factory=_without_cut_gradients,
            params=(
                "self",
                "tensor_send_next",
                "tensor_send_prev",
                "recv_prev",
                "recv_next",
                "tensor_shape",
                "wait_on_reqs",
            ),
            reason="a stage after frozen ones has no gradient to send, for which the stage before "
            "would wait for ever",
            seam_tried="p2p_communicator of the schedules: pretrain() builds none to be replaced",
            remove_when="the schedules ask whether a boundary carries gradients",
        ),
        PatchSpec(
            name="checkpointed-layers",
            target="megatron.core.recompute:checkpointed_forward",
            kind=Kind.WRAP,
            factory=_checkpointing,
            params=(
                "self",
                "hidden_states",
                "attention_mask",
                "context",
                "context_mask",
                "rotary_pos_emb",
                "attention_bias",
                "packed_seq_params",
                "use_inner_quantization_context",
                "padding_mask",
                "extract_layer_indices",
                "layer_offset",
            ),
            bindings=(
                "megatron.core.transformer.transformer_block:checkpointed_forward",
                "megatron.core.models.hybrid.hybrid_block:checkpointed_forward",
            ),
            reason="which layers a checkpoint holds decides whether it must be part of the graph",
            seam_tried="module hooks: a checkpoint is no module",
            remove_when="upstream's checkpoint no longer needs an input with a gradient",
        ),
        PatchSpec(
            name="checkpoint-behind-a-frozen-front",
            target="megatron.core.tensor_parallel.random:checkpoint",
            kind=Kind.WRAP,
            factory=_checkpoint,
            params=("function", "distribute_saved_activations", "args"),
            bindings=("megatron.core.tensor_parallel:checkpoint",),
            reason="trained layers in a checkpoint whose input requires no gradient get none, "
            "silently",
            seam_tried="requires_grad on the input of the block: frozen layers would be recomputed "
            "and passed back through",
            remove_when="upstream's checkpoint no longer needs an input with a gradient",
        ),
        PatchSpec(
            name="embedding-frozen-from-the-start",
            target="megatron.core.models.common.embeddings.language_model_embedding:"
            "LanguageModelEmbedding.__init__",
            kind=Kind.WRAP,
            factory=_frozen_from_the_start,
            params=(
                "self",
                "config",
                "vocab_size",
                "max_sequence_length",
                "position_embedding_type",
                "num_tokentypes",
                "scatter_to_sequence_parallel",
                "tp_group",
            ),
            reason="a resumed run must build its optimizer without what was frozen when it was "
            "saved, or the saved state does not fit",
            seam_tried="pre_wrap_hooks of ModelConfig: a script with its own provider has none",
            remove_when="Megatron calls user hooks on a model before it is wrapped",
        ),
        PatchSpec(
            name="steps-of-thawed-parameters",
            target="megatron.core.optimizer.optimizer:"
            "MegatronOptimizer._extract_common_per_param_step",
            kind=Kind.WRAP,
            factory=_common_step,
            params=("state_dict",),
            reason="a checkpoint holds one step, which rank 0 writes: saving fails where thawed "
            "parameters have made fewer, and it is missing where all of rank 0 is frozen; the "
            "dynamic's state in the checkpoint says what each has made",
            seam_tried="one step for all: the first updates of a thawed layer would be several "
            "times too large",
            remove_when="checkpoints hold a step for each parameter",
        ),
    )

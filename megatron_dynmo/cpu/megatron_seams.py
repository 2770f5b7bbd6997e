"""Megatron's own functions that cannot work without CUDA, whatever torch says."""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_dynmo.patching import Kind, PatchSpec

_RNG_LOGGER = logging.getLogger("megatron.core.tensor_parallel.random")
_MOVED_INSIDE_FORK = "CPU RNG state changed within GPU RNG context"
_SETTER_SHA256 = "dea947ca0b7dc92be0bb70f6161b4d04bdcac7e3223e3be967bd05a40898d0de"


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `initialize_megatron` so that it does not insist on CUDA."""

    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        # It is the first parameter, so a caller may have given it by position.
        kwargs.pop("allow_no_cuda", None)
        return original(True, *args[1:], **kwargs)

    return initialize_megatron


def _set_rng_state(original: Callable[..., None]) -> Callable[..., None]:
    """Replace the setter that the RNG tracker uses: set the CPU generator, now."""

    def _set_cuda_rng_state(
        new_state: torch.Tensor, device: int = -1, graph_safe: bool = False
    ) -> None:
        torch.set_rng_state(new_state)

    return _set_cuda_rng_state


def _fork_quietly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the tracker's `fork` so that its own stream is not reported as a stray one.

    Upstream warns when the CPU generator moved inside a fork. Here that is the forked generator.
    """

    @contextlib.contextmanager
    def fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        # One object for each fork: forks nest, and the inner one must not end the outer's silence.
        def silence(record: logging.LogRecord) -> bool:
            return record.msg != _MOVED_INSIDE_FORK

        _RNG_LOGGER.addFilter(silence)
        try:
            with original(self, *args, **kwargs):
                yield
        finally:
            _RNG_LOGGER.removeFilter(silence)

    return fork


def _splits_as_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `maybe_move_tensor_to_cpu` so that `as_numpy` holds for tensors already there."""

    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        moved = original(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    return maybe_move_tensor_to_cpu


def _norm_with_sequence_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `WrappedTorchNorm.__new__` so that torch's norms serve sequence parallelism.

    The norm is over the hidden dimension, so a part of the sequence is normalised as the whole
    would be. Only the gradients of its parameters are partial sums: the mark makes Megatron add
    them over the tensor-parallel group, as it does for its own norms.
    """

    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = original(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return __new__


def _no_warm_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `set_jit_fusion_options` so that nothing is warmed up where nothing is compiled."""

    def set_jit_fusion_options(tp_size: int | None = None) -> None:
        """Do nothing: there are no fused kernels on a CPU."""

    return set_jit_fusion_options


def seam_specs() -> tuple[PatchSpec, ...]:
    """Return the patches of Megatron's own functions."""
    return (*_start_specs(), *_training_specs())


def _start_specs() -> tuple[PatchSpec, ...]:
    """Return the patches that let a run start."""
    return (
        PatchSpec(
            name="cpu-initialize-megatron",
            target="megatron.training.initialize:initialize_megatron",
            kind=Kind.WRAP,
            factory=_allow_no_cuda,
            bindings=(
                "megatron.training.training:initialize_megatron",
                "megatron.training:initialize_megatron",
            ),
            reason="it asserts CUDA unless told otherwise",
            seam_tried="its own allow_no_cuda: pretrain() gives no way to pass it",
            remove_when="pretrain() passes allow_no_cuda on",
        ),
        PatchSpec(
            name="cpu-no-warm-up",
            target="megatron.training.initialize:set_jit_fusion_options",
            kind=Kind.WRAP,
            factory=_no_warm_up,
            params=("tp_size",),
            bindings=("megatron.training.training:set_jit_fusion_options",),
            reason="it warms up fused kernels with random inputs, here from the generator that "
            "--use-cpu-initialization draws the weights from; on a GPU that one is not touched",
            seam_tried="--disable-jit-fuser: the warm-up runs all the same",
            remove_when="the warm-up can be switched off",
        ),
        PatchSpec(
            name="cpu-force-eager",
            target="torch._dynamo.eval_frame:_stance",
            kind=Kind.WRAP,
            factory=lambda default: type(default)("force_eager"),
            reason="functions decorated with torch.compile would call a C++ compiler for each run",
            seam_tried="--disable-jit-fuser: read only after the functions were decorated",
            remove_when="--disable-jit-fuser works after import",
            requires="torch>=2.6",
        ),
    )


def _training_specs() -> tuple[PatchSpec, ...]:
    """Return the patches that let a run train."""
    return (
        PatchSpec(
            name="cpu-set-cuda-rng-state",
            target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
            kind=Kind.REPLACE,
            factory=_set_rng_state,
            params=("new_state", "device", "graph_safe"),
            digests=dict.fromkeys(("0.19.0", "0.19.2"), _SETTER_SHA256),
            reason="it queues the state until CUDA is initialised, which is never",
            seam_tried="torch.cuda.set_rng_state: not what it calls",
            remove_when="it calls torch.cuda.set_rng_state",
        ),
        PatchSpec(
            name="cpu-rng-tracker-fork",
            target="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
            kind=Kind.WRAP,
            factory=_fork_quietly,
            params=("self", "name"),
            reason="it takes the draws of its own stream for stray ones and warns at each",
            seam_tried="a logging filter for good would also hide the warning from later GPU runs",
            remove_when="the warning is raised only where the two generators differ",
        ),
        PatchSpec(
            name="cpu-moe-splits",
            target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            kind=Kind.WRAP,
            factory=_splits_as_numpy,
            params=("tensor", "as_numpy", "record_stream"),
            bindings=("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",),
            reason="split sizes already on the CPU stay tensors, which all_to_all_single refuses",
            seam_tried="none: as_numpy is passed, but ignored for CPU tensors",
            remove_when="as_numpy is honoured for CPU tensors",
        ),
        PatchSpec(
            name="cpu-norm-sequence-parallel",
            target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            kind=Kind.WRAP,
            factory=_norm_with_sequence_parallel,
            params=(
                "cls",
                "config",
                "hidden_size",
                "eps",
                "persist_layer_norm",
                "zero_centered_gamma",
                "normalization",
            ),
            reason="torch's norms refuse sequence parallelism, and Apex's need CUDA",
            seam_tried="a layer spec of our own: the user's specs would not get it",
            remove_when="WrappedTorchNorm marks its parameters itself",
        ),
    )

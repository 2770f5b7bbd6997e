"""Megatron's own functions that cannot work without CUDA, whatever torch says."""

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_dynmo.patching import Kind, PatchSpec

logger = logging.getLogger(__name__)


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `initialize_megatron` so that it does not insist on CUDA."""

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    return initialize_megatron


def _no_warm_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `set_jit_fusion_options`: nothing is compiled, so nothing is warmed up."""

    @functools.wraps(original)
    def set_jit_fusion_options(*args: Any, **kwargs: Any) -> None:
        logger.debug("no fused kernels to warm up on a CPU")

    return set_jit_fusion_options


def _skip_if_built(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compile_helpers` so that it compiles only what is not there yet."""

    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def _set_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the setter of the RNG tracker, which queues its work until CUDA is initialised."""

    @functools.wraps(original)
    def _set_cuda_rng_state(
        new_state: torch.Tensor, device: int = -1, graph_safe: bool = False
    ) -> None:
        torch.set_rng_state(new_state)

    return _set_cuda_rng_state


def _fork(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the tracker's `fork` so that it does not take its own stream for the CPU's.

    Upstream warns when the CPU generator moved inside a fork. Here it is the forked one.
    """

    @functools.wraps(original)
    @contextlib.contextmanager
    def fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with original(self, *args, **kwargs):
            yield

    return fork


def _splits_as_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `maybe_move_tensor_to_cpu` so that `as_numpy` holds for tensors already there."""

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return tensor

    return maybe_move_tensor_to_cpu


def seam_specs() -> tuple[PatchSpec, ...]:
    """Return the patches of Megatron's own functions."""
    return (
        PatchSpec(
            name="cpu.initialize_megatron",
            target="megatron.training.initialize:initialize_megatron",
            kind=Kind.WRAP,
            factory=_allow_no_cuda,
            bindings=(
                "megatron.training.training:initialize_megatron",
                "megatron.training:initialize_megatron",
            ),
            reason="pretrain() calls it without allow_no_cuda, which the function itself offers",
            seam_tried="allow_no_cuda: pretrain() gives no way to pass it",
            remove_when="pretrain() passes allow_no_cuda on",
        ),
        PatchSpec(
            name="cpu.set_jit_fusion_options",
            target="megatron.training.initialize:set_jit_fusion_options",
            kind=Kind.WRAP,
            factory=_no_warm_up,
            bindings=("megatron.training.training:set_jit_fusion_options",),
            reason="it warms up fused kernels in a CUDA context",
            seam_tried="--disable-jit-fuser: read only after the functions were decorated",
            remove_when="the warm-up can be switched off",
        ),
        PatchSpec(
            name="wheel.compile_helpers",
            target="megatron.core.datasets.utils:compile_helpers",
            kind=Kind.WRAP,
            factory=_skip_if_built,
            reason="the wheel holds helpers_cpp built but no Makefile, so `make` fails and exits",
            seam_tried="none: called unconditionally on rank 0",
            remove_when="upstream compiles only when the import fails",
        ),
        PatchSpec(
            name="cpu.set_cuda_rng_state",
            target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
            kind=Kind.WRAP,
            factory=_set_rng_state,
            reason="it queues the state until CUDA is initialised, which is never",
            seam_tried="torch.cuda.set_rng_state: not what it calls",
            remove_when="it calls torch.cuda.set_rng_state",
        ),
        PatchSpec(
            name="cpu.force_eager",
            target="torch._dynamo.eval_frame:_stance",
            kind=Kind.WRAP,
            factory=lambda original: type(original)("force_eager"),
            reason="functions decorated with torch.compile at import would call a C++ compiler",
            seam_tried="--disable-jit-fuser: read only after the functions were decorated",
            remove_when="--disable-jit-fuser works after import",
            requires="torch>=2.6",
        ),
        PatchSpec(
            name="cpu.moe_splits",
            target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            kind=Kind.WRAP,
            factory=_splits_as_numpy,
            bindings=("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",),
            reason="split sizes already on the CPU stay tensors, which all_to_all_single refuses",
            seam_tried="none: as_numpy is passed but ignored for CPU tensors",
            remove_when="as_numpy is honoured for CPU tensors",
        ),
    )

"""Torch's tensor factories: a CUDA device asked for becomes the CPU.

Megatron names its device in literals (`device="cuda"`), so nothing but the factory itself can send
the tensor elsewhere. Plain wrappers rather than a `TorchFunctionMode`: a mode costs something in
every operation and is not seen by the threads of autograd.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dynmo.patching import Kind, PatchSpec

CPU = torch.device("cpu")

# Every factory that Megatron's training path calls with a CUDA device.
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)


def is_cuda(device: object) -> bool:
    """Tell whether `device`, in any form that torch accepts, is a CUDA device.

    Args:
        device: A `torch.device`, a string, an index, or anything else (which is not one).

    Returns:
        True for `"cuda"`, `"cuda:0"`, `torch.device("cuda")` and an index, which torch reads as one
        of CUDA.
    """
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a torch function so that `device=<CUDA>` means the CPU.

    Args:
        original: A function that takes its device by keyword.

    Returns:
        The wrapper; every call without a CUDA device passes through untouched.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(*args, **kwargs)

    return wrapper


def factory_specs() -> tuple[PatchSpec, ...]:
    """Return one patch for each torch factory that Megatron calls with a CUDA device."""
    return tuple(
        PatchSpec(
            name=f"cpu-factory-{name.replace('_', '-')}",
            target=f"torch:{name}",
            kind=Kind.WRAP,
            factory=on_cpu,
            reason=f"Megatron calls torch.{name}(..., device='cuda') with the device as a literal",
            seam_tried="torch.set_default_device only serves calls that name no device",
            remove_when="Megatron takes the device of its tensors from one setting",
            requires="torch>=2.6",
        )
        for name in _FACTORIES
    )

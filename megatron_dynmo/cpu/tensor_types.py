"""Methods of tensors and modules that name CUDA: moving there, pinning, and type names."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dynmo.cpu.factories import CPU, is_cuda
from megatron_dynmo.patching import Kind, PatchSpec

_KEBAB = str.maketrans("._", "--")


def _return_self(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that leaves the object where it is."""

    @functools.wraps(original)
    def stay(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    return stay


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.to` so that a CUDA device, by position or keyword, means the CPU."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and is_cuda(args[0]):
            args = (CPU, *args[1:])
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.type` so that the name of a CPU tensor's type reads as its CUDA counterpart."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str) and self.device.type == "cpu":
            # A TorchFunctionMode comes back to this wrapper for the original.
            return "torch.cuda." + answer.removeprefix("torch.").removeprefix("cuda.")
        return answer

    return type_


def tensor_type_specs() -> tuple[PatchSpec, ...]:
    """Return the patches of `torch.Tensor` and `torch.nn.Module` that a training run needs."""

    def spec(target: str, factory: Callable[..., Any], reason: str, seam: str) -> PatchSpec:
        return PatchSpec(
            name="cpu-" + target.partition(":")[2].lower().translate(_KEBAB),
            target=target,
            kind=Kind.WRAP,
            factory=factory,
            reason=reason,
            seam_tried=seam,
            remove_when="Megatron takes the device of its tensors from one setting",
            requires="torch>=2.6",
        )

    no_seam = "none: the method is called by name in Megatron's own code"
    return (
        spec(
            "torch:Tensor.cuda", _return_self, "batches and the gradient scaler move there", no_seam
        ),
        spec("torch:Tensor.to", _to, "optimizer and checkpoint code moves tensors there", no_seam),
        spec(
            "torch:Tensor.pin_memory",
            _return_self,
            "pinning needs a CUDA driver; on a CPU all memory is as near",
            "--no-pin-memory exists for the data loader alone",
        ),
        spec(
            "torch:Tensor.type",
            _type,
            "the optimizers sort parameters by the text 'torch.cuda.FloatTensor'",
            "none: the text is a literal",
        ),
        spec(
            "torch.nn:Module.cuda",
            _return_self,
            "the model is moved there after it is built",
            "--use-cpu-initialization skips it, but draws other initial weights",
        ),
    )

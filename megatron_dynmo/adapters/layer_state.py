"""What a layer holds beside its optimizer state: weights, buffers, extra state of its modules."""

from __future__ import annotations

import io
from collections.abc import Iterator

import torch

from megatron_dynmo.adapters.optimizer import ParamState
from megatron_dynmo.checksum import checksum
from megatron_dynmo.transport import Parcel

_SUFFIX = "_extra_state"


def module_types(layer: torch.nn.Module) -> list[str]:
    """What a layer is made of, to be compared on both sides of a move."""
    return [f"{name}: {type(module).__qualname__}" for name, module in layer.named_modules()]


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers: state that is trained but no parameter, as a router's expert bias."""
    # Not `state_dict()`, which lets TransformerEngine write out the extra state of every module.
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def weights(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a layer, by parcel name; live tensors."""
    return {
        f"weight/{name}": tensor.detach()
        for name, tensor in layer.state_dict(keep_vars=True).items()
        if not name.endswith(_SUFFIX)
    }


def extra_states(layer: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Extra state of modules (FP8 scales, say) as byte tensors; modules without any are left."""
    for name, value in layer.state_dict().items():
        if not name.endswith(_SUFFIX) or value is None:
            continue
        if isinstance(value, io.BytesIO):
            value = torch.frombuffer(bytearray(value.getvalue()), dtype=torch.uint8)
        if isinstance(value, torch.Tensor) and value.numel():
            yield name, value


def extra_checksum(parcel: Parcel) -> int:
    """Checksum of the modules' extra state in a parcel."""
    extra = (t for name, t in sorted(parcel.tensors.items()) if name.startswith("extra/"))
    return checksum(t.cpu() for t in extra)  # a module may have written it on the host


def set_extra_states(layer: torch.nn.Module, parcel: Parcel) -> None:
    """Give the modules of a layer the extra state that came in a parcel."""
    modules = dict(layer.named_modules())
    for key, value in parcel.tensors.items():
        if key.startswith("extra/"):
            owner = key.removeprefix("extra/").removesuffix(_SUFFIX).rstrip(".")
            modules[owner].set_extra_state(value)


def states_in(
    parcel: Parcel, layer: torch.nn.Module
) -> Iterator[tuple[torch.nn.Parameter, ParamState]]:
    """The optimizer state in a parcel, by parameter of the layer that it came with."""
    for name, param in layer.named_parameters():
        if name not in parcel.values["shards"]:
            continue
        prefix = f"state/{name}/"
        shard = parcel.values["shards"][name]
        yield (
            param,
            ParamState(
                tensors={
                    key.removeprefix(prefix): tensor
                    for key, tensor in parcel.tensors.items()
                    if key.startswith(prefix)
                },
                scalars=dict(parcel.values["scalars"][name]),
                shard=None if shard is None else (shard[0], shard[1]),
            ),
        )

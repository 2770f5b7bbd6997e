"""How many bytes a forward pass keeps for its backward.

On CPU the autograd graph is read, on CUDA the allocator's counter. Nothing is hooked: hooks on
saved tensors would hand a layer's backward copies of its weights without the attributes that
Megatron's gradient accumulation looks for. Reading leaves every number of the run as it was.
Tier: torch, not Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch.autograd.graph import Node

__all__ = ["ActivationMeter", "AllocatorMeter", "SavedTensorMeter", "make_meter"]


class ActivationMeter(Protocol):
    """Measures the forward pass of one micro-batch of one chunk; used once."""

    def before_layer(self) -> None:
        """Note that a layer's forward begins."""
        ...

    def after_layer(self, hidden_in: torch.Tensor, hidden_out: torch.Tensor) -> int:
        """Return the bytes that the layer whose forward just ended keeps."""
        ...

    def rest(self, output: torch.Tensor | None) -> int:
        """Return the bytes kept by the chunk outside its layers; the forward pass has ended."""
        ...


def make_meter(device: torch.device, modules: Iterable[torch.nn.Module]) -> ActivationMeter:
    """Return the meter of a device.

    Args:
        device: where the chunk computes.
        modules: every module of the chunk.
    """
    return AllocatorMeter(device) if device.type == "cuda" else SavedTensorMeter(modules)


class AllocatorMeter:
    """Differences of the CUDA allocator's counter, which is kept on the host: no device sync.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at_start = self._at_layer = torch.cuda.memory_allocated(device)
        self._in_layers = 0

    def before_layer(self) -> None:
        """Read the counter."""
        self._at_layer = torch.cuda.memory_allocated(self._device)

    def after_layer(self, hidden_in: torch.Tensor, hidden_out: torch.Tensor) -> int:
        """Return the growth since the layer's forward began, its output included."""
        growth = max(0, torch.cuda.memory_allocated(self._device) - self._at_layer)
        self._in_layers += growth
        return growth

    def rest(self, output: torch.Tensor | None) -> int:
        """Return the growth since the chunk's forward began less that of its layers."""
        growth = torch.cuda.memory_allocated(self._device) - self._at_start
        return max(0, growth - self._in_layers)


class SavedTensorMeter:
    """Measures one micro-batch of one chunk, layer by layer, counting every storage once.

    A tensor that several layers save (an attention mask, a rotary table) counts for the first of
    them; parameters count for none. The meter keeps the graph's nodes alive: drop it when the
    forward pass of the micro-batch ends.

    Args:
        modules: every module of the chunk, whose parameters are not activations.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._nodes: set[Node] = set()
        self._counted: set[int] = set()
        for module in modules:
            for parameter in module.parameters():
                self._counted.update(_storages(parameter))

    def before_layer(self) -> None:
        """Do nothing: the graph that the layer leaves behind says it all."""

    def after_layer(self, hidden_in: torch.Tensor, hidden_out: torch.Tensor) -> int:
        """Return the bytes saved between the layer's input and its output."""
        return self.bytes_saved(hidden_out, stop=hidden_in)

    def rest(self, output: torch.Tensor | None) -> int:
        """Return the bytes that the chunk saved outside its layers."""
        return 0 if output is None else self.bytes_saved(output)

    def bytes_saved(self, output: torch.Tensor, stop: torch.Tensor | None = None) -> int:
        """Return the bytes saved on the way to `output` that were not counted before.

        Args:
            output: what the layer (or the whole chunk) returned.
            stop: the layer's input; what was computed before it is left for a later call.
        """
        barrier = None if stop is None else stop.grad_fn
        found: dict[int, int] = {}
        pending = [output.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node is barrier or node in self._nodes:
                continue
            self._nodes.add(node)
            self._note_parameter(node)
            for tensor in _saved_tensors(node):
                found.update(_storages(tensor))
            pending.extend(following for following, _ in node.next_functions)
        new = found.keys() - self._counted
        self._counted |= new
        return sum(found[pointer] for pointer in new)

    def _note_parameter(self, node: Node) -> None:
        """Exclude a parameter that the graph leads to but no given module owns (tied weights)."""
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.nn.Parameter):
            self._counted.update(_storages(variable))


def _storages(tensor: torch.Tensor) -> dict[int, int]:
    """Return {address: bytes} of the memory behind a dense or sparse tensor."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        parts = [tensor]
    elif tensor.layout is torch.sparse_csr:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout is torch.sparse_csc:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    else:
        return {}
    storages = [part.untyped_storage() for part in parts]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


@functools.cache
def _saved_names(node_type: type) -> tuple[str, ...]:
    """Return the attributes under which a kind of node shows what it saved."""
    return tuple(
        name
        for name in dir(node_type)
        if name == "saved_tensors" or (name.startswith("_saved_") and "_sym_" not in name)
    )


def _saved_tensors(node: Node) -> Iterator[torch.Tensor]:
    """Yield the tensors a node saved; one that cannot be read (freed, overwritten) is left out."""
    for name in _saved_names(type(node)):
        try:
            value = getattr(node, name)
        except RuntimeError:
            continue
        values = value if isinstance(value, list | tuple) else (value,)
        yield from (item for item in values if isinstance(item, torch.Tensor))

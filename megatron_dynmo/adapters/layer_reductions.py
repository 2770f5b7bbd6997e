"""Reductions of `finalize_model_grads`, one layer at a time instead of one stage at a time.

Megatron packs what all layers of a stage have to reduce into one buffer. A ring starts the sum of
each part of a buffer at another rank, so among three ranks or more the order of additions for an
element depends on where in the buffer, that is beside which layers, it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_tensor_model_parallel_group_if_none

from megatron_dynmo.adapters.model import chunks_of


class ModelPart:
    """Some modules of a model chunk, as much of a chunk as the reductions ask for.

    Attributes:
        ddp_config: The configuration of the chunk's DDP wrapper.
    """

    def __init__(self, ddp_config: Any, modules: dict[str, torch.nn.Module]) -> None:
        """Describe the part.

        Args:
            ddp_config: `DistributedDataParallelConfig` of the chunk.
            modules: Name within the chunk to module, none inside another.
        """
        self.ddp_config = ddp_config
        self._modules = modules

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield each parameter once, under its name within the chunk."""
        seen: set[int] = set()
        for prefix, module in self._modules.items():
            for name, parameter in module.named_parameters(prefix):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def modules(self) -> Iterator[torch.nn.Module]:
        """Yield the modules and all that is inside them."""
        for module in self._modules.values():
            yield from module.modules()


def parts_of(model: Sequence[torch.nn.Module]) -> list[ModelPart]:
    """Cut Megatron's `model` list into its layers and, for each chunk, what is outside of them.

    Returns:
        One part a layer, by chunk and layer_number, and one for the rest of each chunk. Together
        they hold every parameter of the model.
    """
    parts = []
    for chunk in chunks_of(model):
        config = chunk.ddp.ddp_config
        parts += [
            ModelPart(config, {f"decoder.layers.{i}": layer})
            for i, layer in enumerate(chunk.layers)
        ]
        rest = {name: child for name, child in chunk.core.named_children() if name != "decoder"}
        rest |= {
            f"decoder.{name}": child
            for name, child in chunk.block.named_children()
            if name != "layers"
        }
        parts.append(ModelPart(config, rest))
    return parts


def by_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reduction `f(model, config, group...)` so that it runs for each layer by itself.

    Args:
        original: A function that walks the chunks of `model` and reduces what it found at once.

    Returns:
        The wrapper. Collective: the calls of `original`, layer after layer, then the rest of the
        chunk; the ranks of its group own the same layers, so they make the same calls.
    """

    @functools.wraps(original)
    def reduce_by_layer(
        model: Sequence[torch.nn.Module], config: Any, *args: Any, **kwargs: Any
    ) -> None:
        for part in parts_of(model):
            original([part], config, *args, **kwargs)

    return reduce_by_layer


def by_layer_if_order_matters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_allreduce_non_tensor_model_parallel_grads`: by layer among three ranks or more.

    Two ranks add the same two numbers wherever they lie, so there one buffer stays the cheaper way.
    """
    one_by_one = by_layer(original)

    @functools.wraps(original)
    def _allreduce_non_tensor_model_parallel_grads(
        model: Sequence[torch.nn.Module], config: Any, tp_group: dist.ProcessGroup | None = None
    ) -> None:
        tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        reduce = original if tp_group.size() <= 2 else one_by_one
        reduce(model, config, tp_group)

    return _allreduce_non_tensor_model_parallel_grads

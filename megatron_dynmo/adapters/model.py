"""Megatron model chunks as a list of layers that can be taken out and put in.

Tier: adapter. The optimizer and the DDP wrapper are not touched here.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_model_config

from megatron_dynmo.errors import ConfigError

# Attributes of the config that Megatron's `train` sets: None when it builds the model's layers.
_SET_BY_TRAINING = (
    "timers",
    "finalize_model_grads_func",
    "grad_scale_func",
    "moe_grad_scale_func",
    "mtp_grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
)


@dataclass(frozen=True)
class ModelChunk:
    """One virtual stage of this rank: the wrapper chain DDP -> (Float16Module) -> GPTModel.

    Attributes:
        vp_stage: index in Megatron's `model` list.
        ddp: outermost wrapper; its identity is held by the training loop and never changes.
        core: the GPTModel.
        block: its TransformerBlock, whose `layers` this package edits.
        dtype: parameter dtype a new layer must be cast to; None for fp32.
    """

    vp_stage: int
    ddp: torch.nn.Module
    core: Any
    block: TransformerBlock
    dtype: torch.dtype | None

    @property
    def layers(self) -> list[Any]:
        """The live layers, ascending by layer_number."""
        return list(self.block.layers)

    @property
    def layer_numbers(self) -> list[int]:
        """1-based global numbers of the live layers."""
        return [layer.layer_number for layer in self.block.layers]


def chunks_of(model: Sequence[torch.nn.Module]) -> list[ModelChunk]:
    """Look through the wrappers of Megatron's `model` list.

    Raises:
        ConfigError: A chunk is not a GPT-like model with a TransformerBlock named `decoder`.
    """
    return [_chunk_of(vp_stage, outer) for vp_stage, outer in enumerate(model)]


def _chunk_of(vp_stage: int, outer: torch.nn.Module) -> ModelChunk:
    dtype: torch.dtype | None = None
    inner: Any = outer
    while hasattr(inner, "module"):
        if isinstance(inner, Float16Module):
            dtype = torch.float16 if inner.fp16 else torch.bfloat16
        inner = inner.module
    block = getattr(inner, "decoder", None)
    if not isinstance(block, TransformerBlock):
        raise ConfigError(
            f"model chunk {vp_stage} is a {type(inner).__name__} without a TransformerBlock named "
            "'decoder': layers of such a model cannot be moved; use --dynmo-mode observe or off"
        )
    return ModelChunk(vp_stage, outer, inner, block, dtype)


def decoder_layer_specs(chunk: ModelChunk, dynamics: Any = None) -> list[ModuleSpec]:
    """Return the spec of every decoder layer of the whole model, not only of this chunk.

    A live block knows only the specs of its own layers, and none at all when it owns no layer.

    Args:
        chunk: any chunk of the model.
        dynamics: the run's `Dynamics`, which shape and run layers; None without any.
    """
    specs = _stock_layer_specs(chunk)
    return specs if dynamics is None else [dynamics.wrap(spec) for spec in specs]


def _stock_layer_specs(chunk: ModelChunk) -> list[ModuleSpec]:
    """The specs as Megatron makes them."""
    config: TransformerConfig = chunk.block.config
    spec = chunk.core.transformer_layer_spec
    if isinstance(spec, ModuleSpec) and issubclass(spec.module, BaseTransformerLayer):
        return [spec] * config.num_layers
    use_te = config.transformer_impl == "transformer_engine"
    if config.experimental_attention_variant is not None:
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_transformer_block_with_experimental_attention_variant_spec as variant_spec,
        )

        return list(variant_spec(config=_as_one_stage(config)).layer_specs)
    if config.num_moe_experts is not None:
        return list(
            get_gpt_decoder_layer_specs(
                config, use_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
            )
        )
    if config.heterogeneous_block_specs:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
            get_gpt_heterogeneous_layer_spec,
        )

        return list(get_gpt_heterogeneous_layer_spec(_as_one_stage(config), use_te).layer_specs)
    raise ConfigError(
        f"cannot tell the spec of every layer from a {type(spec).__name__}: layers of such a model "
        "cannot be moved; use --dynmo-mode observe"
    )


def _as_one_stage(config: TransformerConfig) -> TransformerConfig:
    """A shallow copy that makes Megatron's spec builders list all layers."""
    whole = copy.copy(config)
    whole.pipeline_model_parallel_size = 1
    whole.virtual_pipeline_model_parallel_size = None
    whole.pipeline_model_parallel_layout = None
    whole.num_layers_in_first_pipeline_stage = None
    whole.num_layers_in_last_pipeline_stage = None
    whole.account_for_embedding_in_pipeline_split = False
    whole.account_for_loss_in_pipeline_split = False
    return whole


def build_layer(chunk: ModelChunk, spec: ModuleSpec, layer_number: int, pp_rank: int) -> Any:
    """Build a layer for a chunk as Megatron itself would have, with undefined weights.

    No random number is drawn from any stream that training uses.

    Args:
        chunk: the chunk that will own the layer.
        spec: the layer's own spec.
        layer_number: its 1-based global number.
        pp_rank: this rank's pipeline rank.

    Returns:
        The layer on the chunk's device and dtype, in the chunk's train/eval mode, not yet
        attached. The caller owns it and must fill every tensor.
    """
    block = chunk.block
    config: TransformerConfig = block.config
    offset = get_transformer_layer_offset(config, block.vp_stage, pp_rank)
    with _without_run(config):
        layer_config = (
            config.get_config_for_layer(layer_number)
            if config.heterogeneous_block_specs
            else config
        )
        with _no_initialization(layer_config), _quantization(layer_config, layer_number):
            layer = build_module(
                spec,
                config=layer_config,
                layer_number=layer_number - offset,
                pg_collection=block.pg_collection,
                vp_stage=block.vp_stage,
            )
    assert layer.layer_number == layer_number, (layer.layer_number, layer_number)
    layer.to(device=_device_of(chunk.core))
    if chunk.dtype is not None:
        layer.to(dtype=chunk.dtype)
        for module in layer.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()
    for parameter in layer.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    layer.train(block.training)
    return layer


def set_layers(chunk: ModelChunk, layers: Sequence[Any], num_layers: int) -> None:
    """Give a chunk exactly these layers and let its block know.

    Args:
        chunk: the chunk.
        layers: layers with contiguous ascending layer_number; the chunk takes them over.
        num_layers: decoder layers of the whole model.
    """
    numbers = [layer.layer_number for layer in layers]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    assert all(1 <= number <= num_layers for number in numbers), numbers
    block = chunk.block
    new = [layer for layer in layers if layer not in set(block.layers)]
    block.layers = torch.nn.ModuleList(layers)
    # Full recompute loops over this number; a stale one silently skips layers.
    block.num_layers_per_pipeline_rank = len(layers)
    for layer in new:
        _finish_init(chunk, layer, numbers.index(layer.layer_number))


def _finish_init(chunk: ModelChunk, layer: Any, index: int) -> None:
    """Let modules read the quantization recipe under the name they now have."""
    recipe = getattr(chunk.core.config, "quant_recipe", None)
    for name, module in layer.named_modules():
        if hasattr(module, "finish_init"):
            full_name = f"decoder.layers.{index}.{name}".rstrip(".")
            module.finish_init(get_quant_config_or_none(full_name, recipe))


def _device_of(module: torch.nn.Module) -> torch.device:
    """The device a stage computes on, also when it owns no parameter."""
    for parameter in module.parameters():
        return parameter.device
    current = torch.cuda.current_device()
    return current if isinstance(current, torch.device) else torch.device("cuda", current)


@contextlib.contextmanager
def _without_run(config: TransformerConfig) -> Iterator[None]:
    """Take what the training loop has put into the config out of it, for the length of a block.

    Some modules keep a deep copy of the config (shared experts, experts of another width than the
    dense MLP, fewer query groups than tensor-parallel ranks, heterogeneous layers). By now methods
    of the model and the optimizer are in it, which cannot be copied: they hold process groups.
    """
    held = {name: getattr(config, name) for name in _SET_BY_TRAINING if hasattr(config, name)}
    for name in held:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(config, name, value)


@contextlib.contextmanager
def _no_initialization(config: TransformerConfig) -> Iterator[None]:
    """Skip weight initialisation and put every random stream back afterwards."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker_states = tracker.get_states()
    cpu_state = torch.random.get_rng_state()
    device_state = torch.cuda.get_rng_state()
    initialize, config.perform_initialization = config.perform_initialization, False
    try:
        yield
    finally:
        config.perform_initialization = initialize
        tracker.set_states(tracker_states)
        torch.cuda.set_rng_state(device_state)
        torch.random.set_rng_state(cpu_state)


def _quantization(config: TransformerConfig, layer_number: int) -> Any:
    if config.fp8:
        return get_fp8_context(config, layer_number - 1, is_init=True)
    if config.fp4:
        return get_fp4_context(config, layer_number - 1, is_init=True)
    return contextlib.nullcontext()


def model_config(model: Sequence[torch.nn.Module]) -> TransformerConfig:
    """The one config object that every module of the model shares."""
    return get_model_config(model[0])

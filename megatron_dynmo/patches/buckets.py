"""Patches of model building: every layer gets a gradient bucket of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_dynmo.patching.spec import Kind, PatchSpec


def _tagged_layers(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron_dynmo.adapters.wrapper import tag_layer

        original(self, *args, **kwargs)
        for layer in self.layers:
            tag_layer(layer)

    return __init__


def _per_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_dynmo.adapters.wrapper import bucket_per_layer

    return bucket_per_layer(original)


def _per_bucket(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_dynmo.adapters.wrapper import reduce_per_bucket

    return reduce_per_bucket(original)


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches that make buckets follow layers."""
    return (
        PatchSpec(
            name="transformer-block-tags",
            target="megatron.core.transformer.transformer_block:TransformerBlock.__init__",
            kind=Kind.WRAP,
            factory=_tagged_layers,
            params=(
                "self",
                "config",
                "spec",
                "post_layer_norm",
                "pre_process",
                "post_process",
                "pg_collection",
                "vp_stage",
            ),
            reason="parameters must say which layer they belong to before DDP plans its buckets",
            seam_tried="ModelConfig.pre_wrap_hooks: a script with its own model provider has none",
            remove_when="DDP plans buckets from modules instead of a flat parameter list",
        ),
        PatchSpec(
            name="buckets-per-layer-sharded",
            target="megatron.core.optimizer.distrib_optimizer:"
            "DistributedOptimizer._compute_per_buffer_param_layout",
            kind=Kind.WRAP,
            factory=_per_layer,
            params=(
                "params",
                "bucket_size",
                "data_parallel_world_size",
                "ddp_config",
                "param_indices",
            ),
            reason="a layer's optimizer shards must not depend on its neighbours, or a move would "
            "re-cut the shards of layers that stay",
            seam_tried="full_param_layout of DDP: the model builder computes it itself",
            remove_when="Megatron can plan one bucket per layer",
        ),
        PatchSpec(
            name="buckets-per-layer",
            target="megatron.core.distributed.param_and_grad_buffer:"
            "_compute_default_per_buffer_param_layout",
            kind=Kind.WRAP,
            factory=_per_layer,
            params=("params", "bucket_size"),
            reason="where a gradient sits in a reduction decides the order of its additions over "
            "three and more data-parallel ranks; it must not change with a move",
            seam_tried="full_param_layout of DDP: the model builder passes none here",
            remove_when="Megatron can plan one bucket per layer",
        ),
        PatchSpec(
            name="reduce-per-bucket",
            target="megatron.core.distributed.param_and_grad_buffer:partition_buckets",
            kind=Kind.WRAP,
            factory=_per_bucket,
            params=(
                "buffers",
                "force_single_bucket_group",
                "reduce_scatter_with_fp32_accumulation",
            ),
            bindings=(
                "megatron.core.distributed.distributed_data_parallel:partition_buckets",
                "megatron.core.optimizer.distrib_optimizer:partition_buckets",
            ),
            reason="chunks after the first reduce all buckets in one operation, in which the order "
            "of additions depends on a layer's neighbours",
            seam_tried="disable_bucketing of DDP: the model builder sets it",
            remove_when="Megatron can reduce bucket by bucket in every chunk",
        ),
    )

"""The layout in force, read from the live model, and the places in Megatron that must know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_dynmo.adapters.model import ModelChunk
from megatron_dynmo.adapters.topology import Topology
from megatron_dynmo.errors import ConservationError
from megatron_dynmo.layout import LayerLayout

# Attribute of Megatron's arguments: the layout that the run was started with, before any move.
START_LAYOUT = "dynmo_start_layout"
# The other ways to ask for an uneven split; Megatron refuses them beside a layout.
SPLIT_ARGUMENTS = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
_SPLIT_CONFIG = {
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


def ownership(topology: Topology, chunks: Sequence[ModelChunk], num_layers: int) -> torch.Tensor:
    """Gather which layers each rank of this pipeline really holds.

    Args:
        topology: this rank's place.
        chunks: live chunks of this rank.
        num_layers: decoder layers of the model.

    Returns:
        int64 [pp_size, virtual_stages, num_layers] on the CPU; entry is how often the layer is
        held there (0 or 1 when all is well). The caller owns it.

    Collective:
        All ranks of the pipeline group.
    """
    mine = torch.zeros(topology.virtual_stages, num_layers, dtype=torch.int64)
    for chunk in chunks:
        for number in chunk.layer_numbers:
            mine[chunk.vp_stage, number - 1] += 1
    mine = mine.to(topology.device)
    parts = [torch.empty_like(mine) for _ in range(topology.pp_size)]
    dist.all_gather(parts, mine, group=topology.pp_group)
    return torch.stack(parts).cpu()


def live_layout(
    topology: Topology, chunks: Sequence[ModelChunk], num_layers: int, config: Any
) -> LayerLayout:
    """Read the layout from the layers that the ranks hold, not from what was configured.

    Args:
        topology: this rank's place.
        chunks: live chunks of this rank.
        num_layers: decoder layers of the model.
        config: Megatron's TransformerConfig (for MTP).

    Raises:
        ConservationError: A layer is held by no chunk or by two, or the order is broken.

    Collective:
        All ranks of the pipeline group.
    """
    held = ownership(topology, chunks, num_layers)
    check_conserved(held)
    counts = held.sum(dim=2).transpose(0, 1).flatten().tolist()
    boundaries = [0]
    for count in counts:
        boundaries.append(boundaries[-1] + count)
    layout = LayerLayout.from_boundaries(
        boundaries,
        num_stages=topology.pp_size,
        virtual_stages=topology.virtual_stages,
        mtp_num_layers=config.mtp_num_layers or 0,
        mtp_chunk=_mtp_chunk(config),
    )
    for number in range(1, num_layers + 1):
        pp_rank, vp_stage = layout.owner_of(number)
        if held[pp_rank, vp_stage, number - 1] != 1:
            raise ConservationError(
                f"layer {number} is not on (pp_rank {pp_rank}, vp_stage {vp_stage}) where the "
                f"order of layers wants it; the layers held are {layout.to_megatron()} by count"
            )
    return layout


def check_conserved(held: torch.Tensor) -> None:
    """Raise unless every layer is held exactly once.

    Args:
        held: what `ownership` returns.

    Raises:
        ConservationError: Names the layers that are lost or doubled.
    """
    copies = held.sum(dim=(0, 1))
    lost = [i + 1 for i, n in enumerate(copies.tolist()) if n == 0]
    doubled = [i + 1 for i, n in enumerate(copies.tolist()) if n > 1]
    if lost or doubled:
        raise ConservationError(
            f"layers held by no pipeline rank: {lost}; by more than one: {doubled}. "
            "Training must not go on; restart from the last checkpoint"
        )


def _mtp_chunk(config: Any) -> int | None:
    """vp-major index of the chunk that holds the MTP block; None for the last or none."""
    layout = config.pipeline_model_parallel_layout
    if not config.mtp_num_layers or layout is None:
        return None
    for vp_stage in range(layout.virtual_pipeline_model_parallel_size):
        for pp_rank, row in enumerate(layout.layout):
            if any(kind.name == "mtp" for kind in row[vp_stage]):
                return vp_stage * layout.pipeline_model_parallel_size + pp_rank
    return None


def install_layout(layout: LayerLayout, config: Any, args: Namespace) -> None:
    """Make Megatron's config and arguments say this layout.

    Megatron derives layer offsets, checkpoint keys and recompute bounds from it. Layout objects
    are cached and shared between configs, so a new one is put in place and none is edited.

    Args:
        layout: the layout in force from now on.
        config: the TransformerConfig that all modules share.
        args: Megatron's arguments, which travel in checkpoints.
    """
    text = layout.to_megatron()
    if not hasattr(args, START_LAYOUT):
        setattr(args, START_LAYOUT, args.pipeline_model_parallel_layout)
    config.pipeline_model_parallel_layout = PipelineParallelLayerLayout(text, layout.num_stages)
    args.pipeline_model_parallel_layout = text
    if config.pipeline_model_parallel_size != layout.num_stages:
        config.pipeline_model_parallel_size = layout.num_stages
        if config.virtual_pipeline_model_parallel_size is not None:
            # Megatron's default; another number need not suit the new stages.
            for owner in (config, args):
                if hasattr(owner, "microbatch_group_size_per_vp_stage"):
                    owner.microbatch_group_size_per_vp_stage = layout.num_stages
    for owner, fields in ((config, _SPLIT_CONFIG), (args, SPLIT_ARGUMENTS)):
        for name, neutral in fields.items():
            if hasattr(owner, name):
                setattr(owner, name, neutral)

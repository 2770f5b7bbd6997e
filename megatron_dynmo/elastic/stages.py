"""Layouts of the same model on more and on fewer pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megatron_dynmo.layout import LayerLayout


def spread(layout: LayerLayout, places: Sequence[int], num_stages: int) -> LayerLayout:
    """A layout on more stages in which the other ones hold no layer.

    Args:
        layout: on `len(places)` stages.
        places: pp_rank, among `num_stages`, of each of its stages; ascending, the first and the
            last included.
        num_stages: pipeline stages of the answer.
    """
    assert places[0] == 0 and places[-1] == num_stages - 1 and len(places) == layout.num_stages
    sizes = [0] * (num_stages * layout.virtual_stages)
    mtp_chunk = None
    for chunk, (start, end) in enumerate(
        zip(layout.chunk_boundaries, layout.chunk_boundaries[1:], strict=False)
    ):
        vp_stage, stage = divmod(chunk, layout.num_stages)
        sizes[vp_stage * num_stages + places[stage]] = end - start
        if chunk == layout.mtp_chunk:
            mtp_chunk = vp_stage * num_stages + places[stage]
    return LayerLayout((0, *accumulate(sizes)), num_stages, layout.mtp_num_layers, mtp_chunk)


def without_empty(layout: LayerLayout, places: Sequence[int]) -> LayerLayout:
    """The inverse of `spread`: the same layout on the stages at these places alone.

    Args:
        layout: whose other stages hold no layer.
        places: pp_rank of each stage that stays, ascending.
    """
    narrow = LayerLayout(
        (
            0,
            *accumulate(
                len(layout.layers_of(place, vp_stage))
                for vp_stage in range(layout.virtual_stages)
                for place in places
            ),
        ),
        len(places),
        layout.mtp_num_layers,
        None if layout.mtp_owner is None else _chunk(layout.mtp_owner, places),
    )
    assert narrow.num_layers == layout.num_layers, (str(layout), places)
    return narrow


def _chunk(owner: tuple[int, int], places: Sequence[int]) -> int:
    pp_rank, vp_stage = owner
    return vp_stage * len(places) + list(places).index(pp_rank)

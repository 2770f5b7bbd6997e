"""Layouts as people write them: Megatron's text, or layer counts such as 16,16,16,13."""

from __future__ import annotations

import re
from itertools import accumulate

from megatron_dynmo.errors import LayoutError
from megatron_dynmo.layout import LayerLayout

__all__ = ["parse_layout"]

_COUNT = re.compile(r"(?P<layers>\d+)(?:[*x\u00d7](?P<times>\d+))?")
_MAX_CHUNKS = 1_000_000


def parse_layout(
    text: str, *, num_layers: int, num_stages: int, mtp_layers: int = 0
) -> LayerLayout:
    """Read a layout in either form.

    Args:
        text: Megatron's layout, or the layers of each chunk in vp-major order, with commas;
            12x6 is six chunks of 12.
        num_layers: decoder layers of the model, without MTP.
        num_stages: pipeline-parallel size.
        mtp_layers: MTP layers of the model, for the form that does not say them.

    Raises:
        LayoutError: naming the count found and the count wanted.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(_COUNT.fullmatch(part) for part in parts):
        return LayerLayout.from_megatron(text, num_layers=num_layers, num_stages=num_stages)
    sizes: list[int] = []
    for part in parts:
        match = _COUNT.fullmatch(part)
        assert match is not None
        times = int(match["times"] or 1)
        if len(sizes) + times > _MAX_CHUNKS:
            raise LayoutError(f"the layout {text!r} has more than {_MAX_CHUNKS} chunks")
        sizes += [int(match["layers"])] * times
    if sum(sizes) != num_layers:
        raise LayoutError(
            f"{sum(sizes)} of {num_layers} layers: the counts {text!r} add up to {sum(sizes)}, the "
            f"model has {num_layers} decoder layers"
        )
    if num_stages < 1 or len(sizes) % num_stages:
        raise LayoutError(
            f"{len(sizes)} chunks on {num_stages} pipeline stages: give one count for every "
            "pp_rank and vp_stage, a multiple of the pipeline size"
        )
    return LayerLayout((0, *accumulate(sizes)), num_stages, mtp_layers)

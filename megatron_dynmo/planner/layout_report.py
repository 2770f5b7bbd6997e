"""What a layout makes of an iteration: load and memory of every rank, bubble, time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.cost import (
    ModelCosts,
    bubble_fraction,
    imbalance,
    schedule_times,
    stage_costs,
)
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.pipeline_schedule import rank_order

__all__ = ["LayoutReport", "RankReport", "report_layout"]


@dataclass(frozen=True)
class RankReport:
    """One pipeline rank under a layout, over all its chunks.

    Attributes:
        pp_rank: the rank.
        num_layers: decoder layers.
        forward_ms: forward of one micro-batch.
        backward_ms: backward of one micro-batch.
        memory_bytes: parameters, gradients, optimizer state and the most activations in flight.
        activation_bytes: those activations.
        share: of the time of all ranks.
    """

    pp_rank: int
    num_layers: int
    forward_ms: float
    backward_ms: float
    memory_bytes: int
    activation_bytes: int
    share: float

    @property
    def total_ms(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class LayoutReport:
    """A layout and what it makes of an iteration.

    Attributes:
        layout: the layout.
        ranks: one for each pipeline rank.
        imbalance: slowest rank over the mean, less 1.
        bubble_fraction: share of the ranks' time that is idle.
        iteration_ms: predicted time of an iteration.
    """

    layout: LayerLayout
    ranks: list[RankReport]
    imbalance: float
    bubble_fraction: float
    iteration_ms: float

    @property
    def slowest_ms(self) -> float:
        """Time of the slowest rank for one micro-batch."""
        return max(rank.total_ms for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """The document of `dynmo plan --json` for one layout."""
        return {
            "layout": self.layout.to_megatron(),
            "boundaries": self.layout.boundaries,
            "stages": [
                {
                    "pp_rank": rank.pp_rank,
                    "forward_ms": rank.forward_ms,
                    "backward_ms": rank.backward_ms,
                    "memory_bytes": rank.memory_bytes,
                    "activation_bytes": rank.activation_bytes,
                    "layers": rank.num_layers,
                    "share": rank.share,
                }
                for rank in self.ranks
            ],
            "imbalance": self.imbalance,
            "bubble_fraction": self.bubble_fraction,
            "iteration_ms": self.iteration_ms,
        }


def report_layout(costs: ModelCosts, layout: LayerLayout, transient_bytes: int = 0) -> LayoutReport:
    """What a layout makes of an iteration.

    Args:
        costs: the model's costs.
        layout: who owns which layers.
        transient_bytes: memory that every rank needs for a moment besides.

    Raises:
        ConfigError: costs of another number of layers, or micro-batches that do not suit.
    """
    chunks = stage_costs(costs, layout)
    shape = (layout.virtual_stages, layout.num_stages)
    forward = np.array([chunk.forward_ms for chunk in chunks]).reshape(shape)
    backward = np.array([chunk.backward_ms for chunk in chunks]).reshape(shape)
    schedule = "interleaved" if layout.virtual_stages > 1 else "1f1b"
    times = schedule_times(schedule, forward, backward, costs.num_microbatches, costs.p2p_ms)
    loads = (forward + backward).sum(axis=0).tolist()
    states = np.array([chunk.memory_bytes for chunk in chunks]).reshape(shape).sum(axis=0)
    active = np.array([chunk.activation_bytes for chunk in chunks]).reshape(shape)
    in_flight = [
        _peak_activations(active[:, rank], rank, layout, costs.num_microbatches)
        for rank in range(layout.num_stages)
    ]
    tails = [
        np.array([getattr(chunk, name) for chunk in chunks]).reshape(shape).sum(axis=0)
        for name in ("reduce_ms", "optimizer_ms")
    ]
    ranks = [
        RankReport(
            rank,
            layout.num_layers_of_rank(rank),
            float(forward[:, rank].sum()),
            float(backward[:, rank].sum()),
            int(states[rank]) + in_flight[rank] + transient_bytes,
            in_flight[rank],
            loads[rank] / sum(loads) if sum(loads) > 0 else 0.0,
        )
        for rank in range(layout.num_stages)
    ]
    return LayoutReport(
        layout,
        ranks,
        imbalance(loads),
        bubble_fraction(times.busy_ms, times.idle_ms),
        float((np.array(times.finish_ms) + tails[0]).max() + tails[1].max()),
    )


def _peak_activations(
    per_microbatch: NDArray[np.int64], pp_rank: int, layout: LayerLayout, num_microbatches: int
) -> int:
    """Most bytes of activations that a rank holds, walking through its schedule."""
    held = peak = 0
    schedule = "interleaved" if layout.virtual_stages > 1 else "1f1b"
    for direction, vp_stage, _ in rank_order(
        schedule, pp_rank, layout.num_stages, num_microbatches, virtual_stages=layout.virtual_stages
    ):
        held += int(per_microbatch[vp_stage]) * (1 if direction == "forward" else -1)
        peak = max(peak, held)
    return peak

"""Predicted iteration time and memory of many splits at once, under the same costs. Tier: pure.

The numbers of `cost.predict_layout_ms` for a whole set of layouts in a few vector operations, a
lower bound of them that needs no schedule, and what the fullest rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.balancers.climb import Splits
from megatron_dynmo.batch_schedule import finish_times
from megatron_dynmo.cost import ModelCosts
from megatron_dynmo.pipeline_schedule import microbatches_in_flight

__all__ = ["SplitPredictions"]

type Array = NDArray[np.float64]

_BYTES = ("memory_bytes", "activation_bytes")


class SplitPredictions:
    """What splits of one model would take. `splits` is [splits, chunks + 1] everywhere.

    Args:
        costs: of the model, on a rank of speed 1.
        num_stages: pipeline-parallel size.
        virtual_stages: chunks on each rank.
        stage_speeds: relative speed of each rank; equal when None.
        schedule: "1f1b", "interleaved" or "gpipe".
    """

    def __init__(
        self,
        costs: ModelCosts,
        num_stages: int,
        virtual_stages: int,
        stage_speeds: Sequence[float] | None,
        schedule: str,
    ) -> None:
        self._costs, self._schedule = costs, schedule
        self._shape = (virtual_stages, num_stages)
        self._speeds = np.ones(num_stages) if stage_speeds is None else np.array(stage_speeds)
        self._sums: dict[str, NDArray[Any]] = {}

    def iteration_ms(self, splits: Splits) -> Array:
        """[splits], as `cost.predict_layout_ms` up to rounding.

        Raises:
            ConfigError: the micro-batches do not suit the schedule.
        """
        m, p2p_ms = self._costs.num_microbatches, self._costs.p2p_ms
        forward, backward = self._times("forward_ms", splits), self._times("backward_ms", splits)
        finish = finish_times(self._schedule, forward, backward, m, p2p_ms)
        reduced: Array = (finish + self._per_rank_ms("reduce_ms", splits)).max(axis=1)
        return reduced + self._per_rank_ms("optimizer_ms", splits).max(axis=1)

    def at_least_ms(self, splits: Splits) -> Array:
        """[splits], a lower bound of `iteration_ms` without going through the schedule.

        It is the longest of some chains of passes that wait for each other. Most begin with the
        first forward and end with the last backward of the first rank: through the ranks before
        s, all passes of rank s, and back; and under 1F1B, where rank s has P - 1 - s forwards
        before its first backward, the first micro-batch's way to the end and back to s, then the
        rest of s, or most of s and then the last micro-batch's way. Others end on rank s, with
        its reduction.
        """
        m, p2p_ms = self._costs.num_microbatches, self._costs.p2p_ms
        forward, backward = self._times("forward_ms", splits), self._times("backward_ms", splits)
        reduce_ms = self._per_rank_ms("reduce_ms", splits)
        f, b = forward[:, 0], backward[:, 0]
        ranks = np.arange(self._shape[1])
        busy = np.cumsum(f, axis=1) - f + p2p_ms * ranks + m * (forward + backward).sum(axis=1)
        back = np.cumsum(b, axis=1) - b + p2p_ms * ranks
        hops = self._shape[0] * self._shape[1] - 1
        way = (forward + backward).sum(axis=(1, 2)) + 2 * p2p_ms * hops
        if self._schedule == "1f1b":
            steady = np.maximum(m - len(ranks) + ranks, 0)
            rest = np.maximum((m - 1) * b + steady * f, (m - 1) * f + steady * b)
            way += rest.max(axis=1)
        on_first: Array = np.maximum((busy + back).max(axis=1), way) + reduce_ms[:, 0]
        ends: Array = np.maximum(on_first, (busy + reduce_ms).max(axis=1))
        return ends + self._per_rank_ms("optimizer_ms", splits).max(axis=1)

    def peak_bytes(self, splits: Splits) -> NDArray[np.int64]:
        """[splits], what the fullest rank holds, activations of micro-batches in flight included.

        Raises:
            ConfigError: the micro-batches do not suit the schedule.
        """
        held = self._chunks("memory_bytes", splits).sum(axis=1)
        kept = self._chunks("activation_bytes", splits)
        virtual_stages, num_stages = self._shape
        for rank in range(num_stages):
            in_flight = microbatches_in_flight(
                self._schedule, rank, num_stages, virtual_stages, self._costs.num_microbatches
            )
            held[:, rank] += (kept[:, :, rank] @ in_flight.T).max(axis=1)
        peak: NDArray[np.int64] = held.max(axis=1)
        return peak

    def _times(self, name: str, splits: Splits) -> Array:
        """[splits, virtual_stages, num_stages] ms on the ranks as they are."""
        times: Array = self._chunks(name, splits) / self._speeds
        return times

    def _per_rank_ms(self, name: str, splits: Splits) -> Array:
        times: Array = self._times(name, splits).sum(axis=1)
        return times

    def _chunks(self, name: str, splits: Splits) -> NDArray[Any]:
        """[splits, virtual_stages, num_stages] sums over what each chunk owns."""
        sums = self._sums.get(name)
        if sums is None:
            kind = np.int64 if name in _BYTES else np.float64
            values = [getattr(layer, name) for layer in self._costs.layers]
            sums = self._sums[name] = np.cumsum(np.array([0, *values], dtype=kind), dtype=kind)
        # Differences of sums can fall below zero by a rounding error, never by more.
        chunks = np.maximum(np.diff(sums[splits], axis=1), 0)
        chunks[:, 0] += getattr(self._costs.first_stage_extra, name)
        chunks[:, -1] += getattr(self._costs.last_stage_extra, name)
        return chunks.reshape(-1, *self._shape)

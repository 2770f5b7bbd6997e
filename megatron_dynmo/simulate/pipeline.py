"""The pipeline of a simulation: what a split of the layers makes of a trace.

A split is given by its boundaries, num_stages * virtual_stages + 1 cumulative layer counts in
vp-major order, as in `LayerLayout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.batch_schedule import finish_times
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.pipeline_schedule import SCHEDULES, microbatches_in_flight, rank_order
from megatron_dynmo.simulate.trace import CostTrace

__all__ = ["Boundaries", "Case", "Move", "Pipeline"]

type Array = NDArray[np.float64]
type Boundaries = tuple[int, ...]

_LOOK_AHEAD = 32
_MAX_KNOWN = 256  # splits whose iteration times are kept


@dataclass(frozen=True)
class Pipeline:
    """The machine and the schedule.

    Attributes:
        num_stages: pipeline ranks.
        num_microbatches: micro-batches of an iteration.
        schedule: "1f1b", "interleaved" or "gpipe".
        virtual_stages: chunks on each rank; more than 1 only when interleaved.
        p2p_ms: one hop between stages, from the end of a pass to the arrival of its output.
        move_fixed_ms: cost of a move besides its bytes (prepare, rebuild, verify).
        move_gb_per_s: bandwidth of one rank for layers in each direction, 1e9 bytes a second.
        memory_cap_bytes: what a rank may hold; no limit if None. Only our policy keeps to it.
        measuring_noise: standard deviation of a measured layer time, as a share of the time.
        ranks_per_stage: GPUs of a stage (tensor x data parallel), for GPU-hours.

    Raises:
        ConfigError: a value that cannot be, or a schedule that Megatron refuses.
    """

    num_stages: int
    num_microbatches: int
    schedule: str = "1f1b"
    virtual_stages: int = 1
    p2p_ms: float = 0.0
    move_fixed_ms: float = 200.0
    move_gb_per_s: float = 25.0
    memory_cap_bytes: float | None = None
    measuring_noise: float = 0.01
    ranks_per_stage: int = 1

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches", "virtual_stages", "ranks_per_stage"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        for name in ("p2p_ms", "move_fixed_ms", "measuring_noise"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 0 is needed")
        if not 0 < self.move_gb_per_s < np.inf:
            raise ConfigError(f"move_gb_per_s is {self.move_gb_per_s}: it must be above 0")
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"unknown schedule {self.schedule!r}; use one of {', '.join(SCHEDULES)}"
            )
        # Refuses micro-batches that do not suit the interleaved schedule.
        rank_order(
            self.schedule, 0, self.num_stages, self.num_microbatches,
            virtual_stages=self.virtual_stages,
        )  # fmt: skip

    @property
    def num_chunks(self) -> int:
        """Model chunks over all ranks."""
        return self.num_stages * self.virtual_stages


@dataclass(frozen=True)
class Move:
    """A change of the split between two iterations.

    Attributes:
        iteration: number of the iteration before which it happens.
        old: boundaries before.
        new: boundaries after.
        layers_moved: how many layers change their rank.
        num_bytes: sent between ranks, over the whole pipeline.
        cost_ms: how long training stands still.
        reason: one line.
    """

    iteration: int
    old: Boundaries
    new: Boundaries
    layers_moved: int
    num_bytes: int
    cost_ms: float
    reason: str


class Case:
    """A trace on a pipeline. All results are exact for the schedule's order of passes.

    Args:
        trace: costs over the run.
        pipeline: where it runs.

    Raises:
        ConfigError: fewer layers than chunks.
    """

    def __init__(self, trace: CostTrace, pipeline: Pipeline) -> None:
        if trace.num_layers < pipeline.num_chunks:
            raise ConfigError(
                f"{trace.num_layers} layers on {pipeline.num_stages} stages x "
                f"{pipeline.virtual_stages} virtual stages: use at most {trace.num_layers} chunks"
            )
        self.trace = trace
        self.pipeline = pipeline
        self._sums = {
            "forward": _prefix(trace.forward_ms),
            "backward": _prefix(trace.backward_ms),
            "memory": _prefix(trace.memory_bytes),
        }
        self._activations = _prefix(trace.activation_bytes[None])[0]
        self._known: dict[Boundaries, Array] = {}  # not a number where not computed yet

    def layout(self, boundaries: Sequence[int]) -> LayerLayout:
        """The split as a layout."""
        return LayerLayout.from_boundaries(
            boundaries,
            num_stages=self.pipeline.num_stages,
            virtual_stages=self.pipeline.virtual_stages,
        )

    @property
    def uniform(self) -> Boundaries:
        """Megatron's default split; the earliest chunks take what is left over."""
        p = self.pipeline
        return LayerLayout.nearly_even(
            self.trace.num_layers, p.num_stages, virtual_stages=p.virtual_stages
        ).chunk_boundaries

    # ------------------------------------------------------------------ time

    def chunk_times(
        self, boundaries: Sequence[int], rows: slice | NDArray[np.intp]
    ) -> tuple[Array, Array]:
        """Forward and backward ms of each chunk, [rows, virtual_stages, num_stages] each."""
        p, result = self.pipeline, []
        extras = (self.trace.extra_forward_ms, self.trace.extra_backward_ms)
        for name, extra in zip(("forward", "backward"), extras, strict=True):
            # Differences of sums can fall below zero by a rounding error, never by more.
            times = np.maximum(np.diff(self._sums[name][rows][:, list(boundaries)], axis=1), 0.0)
            times[:, 0] += extra[rows, 0]
            times[:, -1] += extra[rows, 1]
            result.append(times.reshape(-1, p.virtual_stages, p.num_stages))
        return result[0], result[1]

    def iteration_ms(self, boundaries: Boundaries, rows: slice | NDArray[np.intp]) -> Array:
        """Time of each of these iterations, [rows]; none is computed twice, nor equal neighbours.

        Args:
            boundaries: the split.
            rows: of the trace.
        """
        known = self._known.pop(boundaries, None)
        if known is None:
            known = np.full(self.trace.num_iterations, np.nan)
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        self._known[boundaries] = known  # now the newest
        wanted = np.arange(self.trace.num_iterations)[rows]
        missing = wanted[np.isnan(known[wanted])]
        if len(missing):
            segments, where = np.unique(self.trace.segment[missing], return_inverse=True)
            first = np.searchsorted(self.trace.segment, segments)
            known[missing] = self.makespans(*self.chunk_times(boundaries, first))[where]
        return known[wanted]

    def makespans(self, forward_ms: Array, backward_ms: Array) -> Array:
        """[rows] from chunk times, [rows, virtual_stages, num_stages] each."""
        p = self.pipeline
        finish = finish_times(p.schedule, forward_ms, backward_ms, p.num_microbatches, p.p2p_ms)
        makespans: Array = finish.max(axis=1)
        return makespans

    def one_iteration_ms(self, boundaries: Boundaries, row: int) -> float:
        """Time of one iteration; computes the next ones too, as they will probably be asked."""
        known = self._known.get(boundaries)
        if known is None or np.isnan(known[row]):
            return float(self.iteration_ms(boundaries, slice(row, row + _LOOK_AHEAD))[0])
        return float(known[row])

    def measured(self, row: int) -> Array:
        """[layers] what measuring makes of the times of an iteration: factors around 1.

        The same for every policy that looks at the row.
        """
        rng = np.random.default_rng([self.trace.num_layers, row])
        noise = self.pipeline.measuring_noise * rng.standard_normal(self.trace.num_layers)
        return np.maximum(1.0 + noise, 0.0)

    # ------------------------------------------------------------------ memory and moves

    def peak_memory_bytes(self, boundaries: Sequence[int], rows: slice) -> Array:
        """[num_stages], largest over the rows: parameters and optimizer, activations in flight."""
        p, bounds = self.pipeline, list(boundaries)
        static = np.diff(self._sums["memory"][rows][:, bounds], axis=1)
        static[:, 0] += self.trace.extra_memory_bytes[0]
        static[:, -1] += self.trace.extra_memory_bytes[1]
        shape = (p.virtual_stages, p.num_stages)
        ranks = static.reshape(-1, *shape).sum(axis=1).max(axis=0)
        kept = np.diff(self._activations[bounds]).reshape(shape)
        in_flight = np.array(
            [
                (
                    microbatches_in_flight(p.schedule, rank, *shape[::-1], p.num_microbatches)
                    @ kept[:, rank]
                ).max()
                for rank in range(p.num_stages)
            ]
        )  # fmt: skip
        total: Array = ranks + in_flight
        return total

    def move(self, old: Boundaries, new: Boundaries, row: int, reason: str) -> Move:
        """What it takes to change the split before the iteration of a row.

        Ranks send and receive at the same time, each at its bandwidth: the busiest one decides.
        """
        p = self.pipeline
        layers = np.arange(self.trace.num_layers)
        source, target = (
            (np.searchsorted(np.asarray(bounds), layers, side="right") - 1) % p.num_stages
            for bounds in (old, new)
        )
        moved = source != target
        sizes = np.where(moved, self.trace.memory_bytes[row], 0.0)
        busiest = max(
            np.bincount(ranks, weights=sizes, minlength=p.num_stages).max()
            for ranks in (source, target)
        )
        cost_ms = p.move_fixed_ms + busiest / (p.move_gb_per_s * 1e6) if moved.any() else 0.0
        iteration = self.trace.first_iteration + row
        return Move(iteration, old, new, int(moved.sum()), int(sizes.sum()), float(cost_ms), reason)


def _prefix(values: Array) -> Array:
    """[rows, n + 1] sums of the first k values of each row."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums

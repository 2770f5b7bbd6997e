"""What the trigger has measured: a short history of iterations, and costs announced for later ones.

Tier: pure. Arithmetic is limited to + - * / and square roots, which IEEE defines to the last bit,
so that ranks with different processors still agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.layout import LayerLayout

__all__ = [
    "CostHint",
    "History",
    "View",
    "difference_sd",
    "iteration_estimate_ms",
    "median",
    "owners",
    "rank_loads",
]

Array = NDArray[np.float64]

_MAD_TO_SD = 1.4826


@dataclass(frozen=True)
class CostHint:
    """An announced change: from an iteration on, a layer's passes take this many times as long.

    Attributes:
        iteration: first iteration with the new cost, 1-based.
        layer_number: 1-based.
        forward_factor: new forward time over the present one.
        backward_factor: the same for the backward; 0 for a layer that needs none any more.
    """

    iteration: int
    layer_number: int
    forward_factor: float = 1.0
    backward_factor: float = 1.0


@dataclass(frozen=True)
class View:
    """Some measured iterations under one placement of ranks and layers.

    Attributes:
        times: [n, 2, num_layers + 2], ms of forward and backward of one micro-batch: the layers,
            then the first stage's extra and the last one's; announced changes applied.
        iteration_ms: [n], as measured.
        is_first_of_segment: [n], whether nothing comparable was measured just before.
    """

    times: Array
    iteration_ms: Array
    is_first_of_segment: NDArray[np.bool_]

    @cached_property
    def totals(self) -> Array:
        """[n, num_layers + 2], forward and backward together."""
        return np.asarray(self.times[:, 0] + self.times[:, 1])

    @cached_property
    def layer_noise(self) -> float:
        """Relative standard deviation of one layer in one iteration, over all layers."""
        return difference_sd(self.totals[:, :-2], self)

    def last(self, count: int) -> View:
        """The newest iterations of this view."""
        return View(
            self.times[-count:], self.iteration_ms[-count:], self.is_first_of_segment[-count:]
        )


@dataclass
class _Row:
    iteration: int
    segment: int
    iteration_ms: float
    times: Array


class History:
    """The newest measured iterations, in segments of one layout and one state of the ranks.

    Args:
        capacity: iterations kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: list[_Row] = []
        self._segment = 0
        self._hints: list[CostHint] = []
        self.costs: ModelCosts | None = None

    def add(self, iteration: int, costs: ModelCosts, iteration_ms: float) -> None:
        """Take one iteration's costs, measured on the present owners."""
        parts: list[LayerCost | ExtraCost] = [*costs.layers]
        parts += [costs.first_stage_extra, costs.last_stage_extra]
        times = np.array([[p.forward_ms for p in parts], [p.backward_ms for p in parts]])
        if self.costs is not None and len(self.costs.layers) != len(costs.layers):
            self._rows.clear()
        self.costs = costs
        self._rows.append(_Row(iteration, self._segment, float(iteration_ms), times))
        del self._rows[: -self._capacity]
        oldest = self._rows[0].iteration
        self._hints = [hint for hint in self._hints if hint.iteration > oldest]

    def announce(self, hints: Iterable[CostHint]) -> None:
        """Take note of changes to come."""
        self._hints.extend(hints)

    def begin_segment(self) -> None:
        """What follows cannot be pooled with what was measured so far."""
        self._segment += 1

    def clear(self) -> None:
        """Forget all measurements and announcements."""
        self._rows.clear()
        self._hints.clear()
        self.costs = None

    @property
    def num_in_segment(self) -> int:
        """Iterations measured in the present segment and still kept."""
        return sum(row.segment == self._segment for row in self._rows)

    def num_since(self, iteration: int) -> int:
        """Measured iterations after this one."""
        return sum(row.iteration > iteration for row in self._rows)

    def hint_starts(self, iteration: int) -> bool:
        """Whether a change takes effect that no measured iteration has seen, but the next will."""
        newest = self._rows[-1].iteration if self._rows else 0
        return any(newest < hint.iteration <= iteration + 1 for hint in self._hints)

    @property
    def has_hints(self) -> bool:
        """Whether any announced change is not yet in all kept measurements."""
        return bool(self._hints)

    def view(self, iteration: int, *, with_hints: bool = True) -> View:
        """All kept iterations, expressed in the costs expected for iteration + 1."""
        rows = self._rows
        times = np.array([row.times for row in rows])
        numbers = np.array([row.iteration for row in rows])
        for hint in self._hints if with_hints else ():
            if hint.iteration <= iteration + 1:
                before = numbers < hint.iteration
                times[before, 0, hint.layer_number - 1] *= hint.forward_factor
                times[before, 1, hint.layer_number - 1] *= hint.backward_factor
        segments = np.array([row.segment for row in rows])
        is_first = np.ones(len(rows), dtype=bool)
        is_first[1:] = segments[1:] != segments[:-1]
        return View(times, np.array([row.iteration_ms for row in rows]), is_first)

    def model_costs(self, times: Array) -> ModelCosts:
        """Newest costs with these times [2, num_layers + 2] in place of the measured ones."""
        assert self.costs is not None
        (*forward, first_f, last_f), (*backward, first_b, last_b) = times.tolist()
        replace = dataclasses.replace
        return replace(
            self.costs,
            layers=tuple(
                LayerCost(**(vars(layer) | {"forward_ms": f, "backward_ms": b}))
                for layer, f, b in zip(self.costs.layers, forward, backward, strict=True)
            ),
            first_stage_extra=replace(
                self.costs.first_stage_extra, forward_ms=first_f, backward_ms=first_b
            ),
            last_stage_extra=replace(
                self.costs.last_stage_extra, forward_ms=last_f, backward_ms=last_b
            ),
        )

    def state(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "rows": [
                [r.iteration, r.segment, r.iteration_ms, r.times.tolist()] for r in self._rows
            ],
            "segment": self._segment,
            "hints": [list(dataclasses.astuple(hint)) for hint in self._hints],
            "costs": None if self.costs is None else _costs_state(self.costs),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self._rows = [_Row(i, s, ms, np.array(times)) for i, s, ms, times in state["rows"]]
        self._segment = state["segment"]
        self._hints = [CostHint(*hint) for hint in state["hints"]]
        costs = state["costs"]
        self.costs = costs and ModelCosts(
            layers=tuple(LayerCost(**layer) for layer in costs["layers"]),
            first_stage_extra=ExtraCost(**costs["first_stage_extra"]),
            last_stage_extra=ExtraCost(**costs["last_stage_extra"]),
            num_microbatches=costs["num_microbatches"],
            p2p_ms=costs["p2p_ms"],
        )


def _costs_state(costs: ModelCosts) -> dict[str, Any]:
    return dataclasses.asdict(costs) | {"layers": [vars(layer).copy() for layer in costs.layers]}


def median(values: Array) -> Array:
    """Median over the first axis; np.median does the same in ten times the time."""
    ordered, count = np.sort(values, axis=0), len(values)
    return np.asarray((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)


def difference_sd(values: Array, view: View) -> float:
    """Relative standard deviation by the median size of successive differences, columns pooled."""
    steps = np.diff(values, axis=0)[~view.is_first_of_segment[1:]]
    middle = median(values)
    timed = middle > 0
    if not steps.size or not timed.any():
        return 0.0
    return (
        _MAD_TO_SD * float(median((np.abs(steps[:, timed]) / middle[timed]).ravel())) / math.sqrt(2)
    )


def owners(layout: LayerLayout) -> NDArray[np.int64]:
    """[num_layers], the pp_rank that owns each layer."""
    sizes = np.diff(layout.chunk_boundaries)
    return np.repeat(np.arange(layout.num_chunks) % layout.num_stages, sizes)


def rank_loads(totals: Array, layout: LayerLayout) -> Array:
    """[n, num_stages], ms of one micro-batch on each rank, extras included.

    Args:
        totals: [n, num_layers + 2] as `View.totals`.
        layout: where the layers are.
    """
    ends = np.zeros((len(totals), layout.num_layers + 1))
    np.cumsum(totals[:, :-2], axis=1, out=ends[:, 1:])
    chunks = np.diff(ends[:, list(layout.chunk_boundaries)], axis=1)
    chunks[:, 0] += totals[:, -2]
    chunks[:, -1] += totals[:, -1]
    return chunks.reshape(len(totals), layout.virtual_stages, layout.num_stages).sum(axis=1)


def iteration_estimate_ms(totals: Array, layout: LayerLayout, num_microbatches: int) -> Array:
    """[n], time of an iteration: the slowest rank never waits but while the pipeline fills.

    Exact for equal stages without latency. It serves where only the spread between iterations or
    a first look matters, over many iterations at once; decisions to move rest on
    `predict_layout_ms`.
    """
    loads = rank_loads(totals, layout)
    slowest = loads.max(axis=1)
    fill = (loads.sum(axis=1) - slowest) / layout.virtual_stages
    return np.asarray(num_microbatches * slowest + fill)

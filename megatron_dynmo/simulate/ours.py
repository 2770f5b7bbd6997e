"""Our policy in a simulation: the trigger and the balancers that a real run has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.balancers.objective import min_max_layout
from megatron_dynmo.cost import ModelCosts
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.simulate.climb import climb
from megatron_dynmo.simulate.pipeline import Boundaries, Case, Move
from megatron_dynmo.simulate.policies import Proposal
from megatron_dynmo.trigger import CostHint, Trigger, TriggerSettings

__all__ = ["Ours"]

_LAYERS_OBSERVED = 500_000  # over the run; a larger one is observed every few iterations
_PASSES_PER_CHOICE = 4_000_000  # forwards and backwards timed to improve on the min-max split
_TINY_MS = 1e-9


class Ours:
    """Observe, let the trigger decide, move. Changes on a schedule are announced to it.

    Args:
        settings: of the trigger; the defaults need no choice.
        observe_every: iterations between two observations; from the size of the run if None.
    """

    name = "ours"

    def __init__(
        self, settings: TriggerSettings | None = None, observe_every: int | None = None
    ) -> None:
        self._settings = settings or TriggerSettings()
        self._every = observe_every
        self._trigger: Trigger | None = None
        self._case: Case | None = None
        self._announced = 0
        self.reasons: list[tuple[int, str]] = []
        """(rows completed, reason) of every decision, also those to stay."""

    def start(self, case: Case) -> Boundaries:
        """Megatron's default."""
        trace, boundaries = case.trace, case.uniform
        self._case = case
        if self._every is None:
            size = trace.num_layers * trace.num_iterations
            self._every = max(1, math.ceil(size / _LAYERS_OBSERVED))
        settings = self._settings
        cap = case.pipeline.memory_cap_bytes
        if cap is not None:
            settings = TriggerSettings(
                settings.window, settings.cooldown, settings.min_gain_pct, settings.interval, cap
            )
        self._trigger = Trigger(settings, choose=self._choose)
        self._trigger.start(case.layout(boundaries), 0, trace.num_iterations)
        return boundaries

    def next_look(self, row: int) -> int:
        """See `Policy.next_look`; a change that was announced is not slept through."""
        assert self._case is not None and self._every is not None
        soon = next((r for r in self._case.trace.announced if r > row), row + self._every)
        return min(row + self._every, soon)

    def look(self, case: Case, row: int, boundaries: Boundaries) -> Proposal | None:
        """Show the trigger the iteration before `row` and ask it."""
        trace, p, trigger = case.trace, case.pipeline, self._trigger
        assert trigger is not None
        costs = trace.costs_at(
            row - 1,
            num_microbatches=p.num_microbatches,
            p2p_ms=p.p2p_ms,
            factors=case.measured(row - 1),
        )
        trigger.observe(row, costs, case.one_iteration_ms(boundaries, row - 1))
        if row in trace.announced:
            trigger.announce(_hints(case, row))
        if not trigger.is_due(row):
            return None
        decision = trigger.decide(row, trace.num_iterations - row)
        self.reasons.append((row, decision.reason))
        if not decision.is_move:
            return None
        return Proposal(decision.new.chunk_boundaries, decision.reason)

    def moved(self, move: Move) -> None:
        """See `Policy.moved`."""
        assert self._trigger is not None and self._case is not None
        row = move.iteration - self._case.trace.first_iteration
        self._trigger.moved(row, self._case.layout(move.new), move.cost_ms, move.num_bytes)

    def _choose(
        self, costs: ModelCosts, layout: LayerLayout, speeds: tuple[float, ...]
    ) -> LayerLayout:
        """The min-max layout, improved by the iteration time of its neighbours.

        As `choose_layout`, with all neighbours timed at once. Within a memory limit the min-max
        layout is taken as it is.
        """
        assert self._case is not None
        p = self._case.pipeline
        best = min_max_layout(
            costs,
            p.num_stages,
            virtual_stages=p.virtual_stages,
            stage_speeds=speeds,
            stage_memory_limit=p.memory_cap_bytes,
            min_layers=0,
            current=layout,
        )
        if p.memory_cap_bytes is not None:
            return best
        times = _Times(self._case, costs, speeds)
        budget = _PASSES_PER_CHOICE // (2 * p.num_microbatches * p.num_chunks)
        boundaries = climb(best.chunk_boundaries, times.of, budget)
        return layout.with_boundaries(boundaries)


class _Times:
    """Predicted iteration times of many splits under the same costs.

    Args:
        case: gives schedule and pipeline.
        costs: of the layers.
        speeds: relative speed of every rank.
    """

    def __init__(self, case: Case, costs: ModelCosts, speeds: tuple[float, ...]) -> None:
        self._case = case
        self._speeds = np.array(speeds)
        self._sums, self._extras = [], []
        for name in ("forward_ms", "backward_ms"):
            layers = [getattr(layer, name) for layer in costs.layers]
            self._sums.append(np.concatenate([[0.0], np.cumsum(layers)]))
            edges = (costs.first_stage_extra, costs.last_stage_extra)
            self._extras.append([getattr(edge, name) for edge in edges])

    def of(self, splits: Sequence[Boundaries]) -> NDArray[np.float64]:
        """[splits] in ms."""
        p, chunks = self._case.pipeline, []
        for sums, (first, last) in zip(self._sums, self._extras, strict=True):
            times = np.maximum(np.diff(sums[np.array(splits)], axis=1), 0.0)
            times[:, 0] += first
            times[:, -1] += last
            chunks.append(times.reshape(-1, p.virtual_stages, p.num_stages) / self._speeds)
        return self._case.makespans(*chunks)


def _hints(case: Case, row: int) -> list[CostHint]:
    """What changes between the iteration before a row and the row's."""
    trace, hints = case.trace, []
    ratios = [
        (times[row] / np.maximum(times[row - 1], _TINY_MS)).tolist()
        for times in (trace.forward_ms, trace.backward_ms)
    ]
    for number, (forward, backward) in enumerate(zip(*ratios, strict=True), 1):
        if (forward, backward) != (1.0, 1.0):
            hints.append(CostHint(row + 1, number, forward, backward))
    return hints

"""Our policy in a simulation: the trigger and the balancers that a real run has."""

from __future__ import annotations

import math

import numpy as np

from megatron_dynmo.balancers.objective import choose_layout
from megatron_dynmo.cost import ModelCosts
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.simulate.pipeline import Boundaries, Case, Move
from megatron_dynmo.simulate.policies import Proposal
from megatron_dynmo.trigger import CostHint, Trigger, TriggerSettings

__all__ = ["Ours"]

_LAYERS_OBSERVED = 500_000  # over the run; a larger one is observed every few iterations
_WORK_PER_CHOICE = 5e7  # to improve on the min-max split, see `choose_layout`: some 25 ms
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
        """As a real run chooses, with more time for it."""
        assert self._case is not None
        p = self._case.pipeline
        choice = choose_layout(
            costs,
            p.num_stages,
            virtual_stages=p.virtual_stages,
            stage_speeds=speeds,
            stage_memory_limit=p.memory_cap_bytes,
            min_layers=0,
            current=layout,
            schedule=p.schedule,
            max_work=_WORK_PER_CHOICE,
        )
        return choice.layout


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

"""When to move: a pure decision from measured windows, the same on every rank.

After each window the balancer proposes a layout for the median costs. It is adopted if

1. it saves at least `min_gain_pct` of the measured iteration,
2. every iteration of the window agrees, and the gain exceeds what noise alone can show
   (`gain`),
3. that sure part of the gain, over the horizon, exceeds the cost of moving. The horizon is what is
   left of training, or less once plans were seen to go stale; the cost is learned from moves
   (`learning`),
4. no pause is on (cooldown: until the last move has earned its cost, doubled for every move in a
   row that failed) and the layout was not tried in vain lately.

A gain that is hardly above its noise is taken half-way, the rest when the next window confirms it.
Every fourth window, averages over all iterations since the last move are tried in the same way:
they find what is small against the noise, and the compromise for a load that swings too fast.

A move is on trial until measured iterations show what it brought, against what the old layout
would take under today's costs; one that lost is rolled back if the rest of training pays for that.
A layer's time is its base cost times the slowness of its rank (`speeds`): the balancer gets
base costs and speeds, so a slow rank gets fewer layers, and its share back when it recovers.

Tier: pure. It sees numbers only; who measures them and who moves layers is not known here.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_dynmo.cost import ModelCosts
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger.appraisal import Appraiser, Choose, Present
from megatron_dynmo.trigger.decision import (
    Decision,
    Proposal,
    TriggerSettings,
    put_move,
    put_rollback,
    put_stay,
)
from megatron_dynmo.trigger.history import CostHint, median, owners
from megatron_dynmo.trigger.learning import FailedMoves, PlanLives
from megatron_dynmo.trigger.speeds import RankSpeeds, time_on_old_owner
from megatron_dynmo.trigger.trial import Trial, judge

__all__ = ["Choose", "CostHint", "Decision", "Trigger", "TriggerSettings"]

logger = logging.getLogger(__name__)

_AVERAGE_EVERY = 4  # windows
_BARRED_WINDOWS = 10  # for which a failed layout is not tried again, the first time


@dataclass(frozen=True)
class _Plan:
    """The last move made: what it replaced and when."""

    old: LayerLayout
    iteration: int


class Trigger:
    """Decides when to move layers; every rank runs it on the same numbers.

    Args:
        settings: what the user set.
        choose: the balancer; may raise BalanceError when no layout fits in memory.
    """

    def __init__(self, settings: TriggerSettings, *, choose: Choose) -> None:
        self._settings = settings
        self._app = Appraiser(settings, choose)
        self._lives, self._failed = PlanLives(), FailedMoves()
        self._plan: _Plan | None = None
        self._trial: Trial | None = None
        self._pending: tuple[Decision, Trial | None] | None = None
        self._not_before = 0  # end of the cooldown
        self._last_decision = 0
        self._last_interval = 0
        self._num_decisions = 0

    # ---------------------------------------------------------------- what happens in the run

    @property
    def _layout(self) -> LayerLayout:
        return self._app.present_layout()

    def start(self, layout: LayerLayout, iteration: int, remaining_iterations: int) -> None:
        """Begin, or go on after `restore`; another layout than before begins afresh.

        Args:
            layout: in force.
            iteration: last one completed, 0 at the very start.
            remaining_iterations: to come.
        """
        if layout == self._app.layout:
            return
        self._app.layout, self._plan, self._trial, self._pending = layout, None, None, None
        self._app.speeds = RankSpeeds(layout.num_stages)
        self._app.history.clear()
        self._not_before = self._last_decision = self._last_interval = iteration

    def observe(self, iteration: int, costs: ModelCosts, iteration_ms: float) -> None:
        """Take a measured iteration.

        Args:
            iteration: 1-based.
            costs: as measured on the present owners, merged over all ranks.
            iteration_ms: the whole training step on the slowest rank.
        """
        self._app.history.add(iteration, costs, iteration_ms)

    def announce(self, changes: Iterable[CostHint]) -> None:
        """Take note of known changes to come; once measured, the measurement counts."""
        self._app.history.announce(changes)

    def is_due(self, iteration: int) -> bool:
        """Whether to call `decide`: a window is full, or an announced change comes next."""
        interval = self._settings.interval
        return (
            self._app.history.num_since(self._last_decision) >= self._settings.window
            or (interval is not None and iteration - self._last_interval >= interval)
            or self._app.history.hint_starts(iteration)
        )

    def moved(
        self, iteration: int, layout: LayerLayout, cost_ms: float, num_bytes: int = 0
    ) -> None:
        """A move was carried out, decided here or forced by the user.

        Args:
            iteration: after which it happened.
            layout: now in force.
            cost_ms: wall time it took.
            num_bytes: sent between ranks; 0 when unknown.
        """
        self._app.move_cost.learn(num_bytes, cost_ms)
        decision, trial = self._pending or (None, None)
        if decision is None or decision.new != layout:
            trial = None
        was_rolled_back = trial is not None and trial is self._trial
        self._plan = None if was_rolled_back else _Plan(self._layout, iteration)
        pause = self._settings.window
        if was_rolled_back:
            self._failed.add(str(self._layout), iteration, _BARRED_WINDOWS * pause)
            trial = None
        elif trial is not None:
            pause = max(pause, math.ceil(cost_ms / trial.predicted_ms))
        self._trial, self._pending, self._app.layout = trial, None, layout
        self._pause(iteration, pause)
        self._lives.see_gain(False, iteration)
        self._app.speeds.layers_moved()
        self._app.history.begin_segment()

    def refused(self, iteration: int, layout: LayerLayout, reason: str) -> None:
        """A move failed before it was committed; the old layout is in force. Back off.

        Args:
            iteration: after which it was tried.
            layout: that was not reached.
            reason: what went wrong; only told, for no kind of failure is worth an early retry.
        """
        logger.info("backing off from %s: %s", layout, reason)
        self._pending = None
        self._failed.add(str(layout), iteration, _BARRED_WINDOWS * self._settings.window)
        self._pause(iteration, self._settings.window)

    def _pause(self, iteration: int, auto: int) -> None:
        """Begin the cooldown."""
        if self._settings.cooldown is None:
            self._not_before = iteration + FailedMoves.back_off(auto, self._failed.in_a_row)
        else:
            self._not_before = iteration + self._settings.cooldown

    # ---------------------------------------------------------------- deciding

    def decide(self, iteration: int, remaining_iterations: int) -> Decision:
        """Say what to do after an iteration.

        Args:
            iteration: last one completed, 1-based.
            remaining_iterations: to come.

        Returns:
            The decision. If it moves, report back by `moved` or `refused`.
        """
        self._pending = None
        measured, window = self._app.history.num_in_segment, self._settings.window
        if measured < window:
            return self._stay(f"{measured} of {window} iterations measured")
        present = self._app.look(iteration, remaining_iterations)
        self._last_decision = iteration
        self._num_decisions += 1
        rollback = self._verify(present)
        if rollback is not None:
            return rollback
        self._see_ranks(present)
        self._see_plan(present)
        waiting = self._waiting(present)
        if waiting is None:
            self._last_interval = iteration
        try:
            return self._propose(present, waiting)
        except BalanceError as error:
            return self._stay(f"the balancer finds no layout: {error}")

    def _propose(self, present: Present, waiting: str | None) -> Decision:
        """Weigh the best layout for the window, then the one for the average."""
        iteration, size, least = (
            present.iteration,
            self._settings.window,
            self._settings.min_gain_pct,
        )
        proposal = self._app.window_proposal(present)
        gain = proposal.gain
        self._lives.see_gain(gain.gain_pct >= least and gain.sure_ms > 0, iteration - size)
        horizon = self._lives.horizon(iteration, present.remaining)
        proposal = dataclasses.replace(proposal, horizon=horizon)
        against = waiting or self._against(proposal, iteration)
        if against is None:
            half = self._app.half_step(proposal, present)
            takes_half = half is not None and self._against(half, iteration) is None
            return self._move(half if half is not None and takes_half else proposal, present)
        enough = max(_AVERAGE_EVERY * size, 2 * (self._lives.median or 0))
        is_turn = self._num_decisions % _AVERAGE_EVERY == 0
        if waiting is None and is_turn and len(present.segment.times) >= enough:
            average = self._app.average_proposal(present)
            if self._against(average, iteration) is None:
                return self._move(average, present)
        return self._stay(against, proposal)

    def _waiting(self, present: Present) -> str | None:
        """Why no move may be made now whatever it would bring; None when it may."""
        if self._settings.interval is not None:
            next_time = self._last_interval + self._settings.interval
            return f"next decision at {next_time}" if present.iteration < next_time else None
        is_exempt = present.announced and self._settings.cooldown is None
        if present.iteration < self._not_before and not is_exempt:
            return f"cooldown until iteration {self._not_before}"
        return None

    def _against(self, proposal: Proposal, iteration: int) -> str | None:
        """What speaks against a move; None when nothing does."""
        until = self._failed.barred_until(str(proposal.gain.new), iteration)
        against = proposal.against(self._layout, self._settings.min_gain_pct)
        if against is None and until is not None:
            return f"{proposal.gain.new} failed before; not again until iteration {until}"
        return against

    def present_costs(self, iteration: int) -> tuple[ModelCosts, tuple[float, ...]] | None:
        """What the last window shows: costs on a healthy rank and the relative speed of each rank.

        Args:
            iteration: last one completed, 1-based.

        Returns:
            None until a whole window was measured under the layout and the ranks of now.
        """
        if self._app.history.num_in_segment < self._settings.window:
            return None
        present = self._app.look(iteration, 0)
        return self._app.base_costs(median(present.window.times)), self._app.speeds.speeds

    # ---------------------------------------------------------------- hindsight

    def _verify(self, present: Present) -> Decision | None:
        """Judge the move on trial; undo it if it lost and the rest of training pays for that."""
        trial = self._trial
        if trial is None:
            return None
        since, window = present.measured, self._settings.window
        after = median(since.times)
        if len(since.times) < 2 * window:
            self._app.speeds.see_move(trial.before, after, trial.old, trial.new, present.tolerance)
        from_rank, to_rank = owners(trial.old), owners(trial.new)
        factors = self._app.speeds.slowness[to_rank] / self._app.speeds.slowness[from_rank]
        moved = from_rank != to_rank
        times = time_on_old_owner(trial.before, after, moved, factors, present.tolerance)
        old_ms = self._app.estimate_ms(times, trial.old)
        verdict = judge(trial, since, present.past, old_ms, window)
        if verdict.outcome == "paid":
            self._trial, self._failed.in_a_row = None, 0
        elif verdict.outcome == "lost":
            cost_ms, source = self._app.cost_of(trial.old, verdict.measured_ms)
            barred = self._failed.barred_until(str(trial.old), present.iteration)
            if barred is None and -verdict.saved_ms * present.remaining > cost_ms:
                decision = put_rollback(trial, verdict, cost_ms, source, present.remaining)
                self._pending = decision, trial
                return decision
            if barred is not None:
                return None  # to be undone as soon as that may be tried again
        if verdict.is_last:
            self._trial = None
            self._failed.in_a_row += verdict.outcome != "paid"
        return None

    def _see_ranks(self, present: Present) -> None:
        """Notice ranks that became slow or recovered; what was measured before is another state."""
        times = median(present.window.times)
        speeds = self._app.speeds
        if present.announced:
            speeds.forget_reference()
        elif speeds.sees_change(times, self._layout) and speeds.see_window(
            times, self._layout, present.tolerance
        ):
            self._app.history.begin_segment()

    def _see_plan(self, present: Present) -> None:
        """Notice when the last plan has turned worse than what it replaced."""
        if self._plan is None or self._plan.old == self._app.layout:
            return
        back = self._app.window_gain(present, self._plan.old)
        if back.agrees and back.sure_ms > 0:
            self._lives.end(present.iteration - self._settings.window - self._plan.iteration)
            self._plan = None

    def _stay(self, reason: str, proposal: Proposal | None = None) -> Decision:
        return put_stay(self._layout, reason, self._app.speeds.describe(), proposal)

    def _move(self, proposal: Proposal, present: Present) -> Decision:
        """Decide to move, and remember what was promised."""
        decision = put_move(self._layout, proposal, self._app.speeds.describe(), present.remaining)
        measured = present.measured.last(self._settings.window)
        trial = Trial(
            old=self._layout,
            new=decision.new,
            iteration=present.iteration,
            predicted_ms=proposal.gain.gain_ms,
            before=median(present.window.times),
            overhead_ms=float(median(measured.iteration_ms))
            - self._app.estimate_ms(median(measured.times), self._layout),
            num_before=len(measured.times),
        )
        self._pending = decision, trial
        return decision

    # ---------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Everything learned and measured, as JSON can hold it; not between decide and moved."""
        return {
            "layout": None if self._app.layout is None else _layout_state(self._app.layout),
            "history": self._app.history.state(),
            "move_cost": self._app.move_cost.state(),
            "lives": self._lives.state(),
            "failed": self._failed.state(),
            "speeds": self._app.speeds.state(),
            "plan": self._plan and [list(self._plan.old.chunk_boundaries), self._plan.iteration],
            "trial": self._trial and self._trial.state(),
            "counters": [
                self._not_before, self._last_decision, self._last_interval, self._num_decisions,
            ],
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; then call `start` with the layout now in force."""
        saved = state["layout"]
        self._app.layout = layout = (
            None if saved is None else LayerLayout(tuple(saved[0]), *saved[1:])
        )
        self._app.history.restore(state["history"])
        self._app.move_cost.restore(state["move_cost"])
        self._lives.restore(state["lives"])
        self._failed.restore(state["failed"])
        self._app.speeds.restore(state["speeds"])
        self._plan = self._trial = self._pending = None
        if layout is not None and state["plan"]:
            boundaries, iteration = state["plan"]
            self._plan = _Plan(layout.with_boundaries(boundaries), iteration)
        if layout is not None and state["trial"]:
            self._trial = Trial.from_state(state["trial"], layout)
        (
            self._not_before, self._last_decision, self._last_interval, self._num_decisions,
        ) = state["counters"]  # fmt: skip


def _layout_state(layout: LayerLayout) -> list[Any]:
    """The fields of a layout."""
    return [
        list(layout.chunk_boundaries), layout.num_stages, layout.mtp_num_layers, layout.mtp_chunk,
    ]  # fmt: skip

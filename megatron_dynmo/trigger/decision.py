"""What the trigger answers, in numbers and in one line for a person. Tier: pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger.gain import Gain
from megatron_dynmo.trigger.trial import Trial, Verdict

__all__ = ["Decision", "Proposal", "TriggerSettings", "put_move", "put_rollback", "put_stay"]


@dataclass(frozen=True)
class Decision:
    """What to do now and why, in one line.

    Attributes:
        action: `move`, `stay` or `rollback`; `advise` where it is told and not carried out.
        reason: one line for a person, also for staying.
        old: layout in force.
        new: layout to reach; equal to `old` when staying.
        predicted_iteration_ms: iteration time expected under `new`; None when unknown.
        gain_pct: predicted gain over the present in percent; None when unknown.
        migration_cost_ms: expected wall time of the move; None when unknown.
    """

    action: str
    reason: str
    old: LayerLayout
    new: LayerLayout
    predicted_iteration_ms: float | None = None
    gain_pct: float | None = None
    migration_cost_ms: float | None = None

    @property
    def is_move(self) -> bool:
        """Whether layers are to change place."""
        return self.new != self.old


@dataclass(frozen=True)
class TriggerSettings:
    """What may be set; the defaults need no thought.

    Attributes:
        window: iterations measured per decision.
        cooldown: iterations to wait after a move; None until it has earned its cost.
        min_gain_pct: gain below which nothing moves.
        interval: decide every so many iterations, without cooldown; None after each window.
        memory_cap_bytes: limit of a stage, checked for half-steps (the balancer checks its own).
    """

    window: int = 3
    cooldown: int | None = None
    min_gain_pct: float = 2.0
    interval: int | None = None
    memory_cap_bytes: float | None = None

    @classmethod
    def from_config(cls, config: DynMoConfig) -> TriggerSettings:
        """Read the settings of a run."""
        cap = config.memory_cap_gb
        return cls(
            window=config.window,
            cooldown=config.cooldown,
            min_gain_pct=config.min_gain_pct,
            interval=config.interval,
            memory_cap_bytes=None if cap is None else cap * 1e9,
        )


@dataclass(frozen=True)
class Proposal:
    """A gain with its price.

    Attributes:
        gain: what a layout would save.
        cost_ms: wall time of the move to it.
        cost_source: where that number comes from.
        horizon: iterations for which the gain counts.
        note: what else a person should know.
    """

    gain: Gain
    cost_ms: float
    cost_source: str
    horizon: float
    note: str = ""

    def against(self, layout: LayerLayout, min_gain_pct: float) -> str | None:
        """What speaks against moving there from `layout`; None when nothing does."""
        gain = self.gain
        if gain.new == layout:
            return f"{gain.new} is the best layout"
        what = f"best layout {gain.new} gains {gain.gain_pct:.1f} %"
        if gain.gain_pct < min_gain_pct:
            return f"{what} (< {min_gain_pct:g} %)"
        if gain.gain_ms <= 0:
            return what
        if not gain.agrees:
            return f"{what} in the median, but not in all {gain.span} iterations"
        if gain.sure_ms <= 0:
            return f"{what}, {_ms(gain.gain_ms)}, but noise alone shows {_ms(gain.margin_ms)}"
        if gain.sure_ms * self.horizon <= self.cost_ms:
            return (
                f"{what}, {_ms(gain.gain_ms)} an iteration (surely {gain.sure_ms:.3g}), which "
                f"over {self.horizon:.0f} iterations does not pay for {_ms(self.cost_ms)} of "
                f"moving ({self.cost_source})"
            )
        return None


def put_stay(
    layout: LayerLayout, reason: str, slow_ranks: str, proposal: Proposal | None = None
) -> Decision:
    """Say why nothing moves.

    Args:
        layout: in force.
        reason: what speaks against moving.
        slow_ranks: which ranks are slow; may be empty.
        proposal: what was considered.
    """
    text = reason + (f"; {slow_ranks}" if slow_ranks else "")
    if proposal is None:
        return Decision("stay", text, layout, layout)
    gain = proposal.gain
    return Decision(
        "stay", text, layout, layout, gain.iteration_ms, gain.gain_pct, proposal.cost_ms
    )


def put_move(
    layout: LayerLayout, proposal: Proposal, slow_ranks: str, remaining_iterations: int
) -> Decision:
    """Say what a move saves and costs; arguments as `put_stay`."""
    gain = proposal.gain
    payback = math.ceil(proposal.cost_ms / gain.gain_ms)
    notes = "".join(f"; {note}" for note in (proposal.note, slow_ranks) if note)
    return Decision(
        "move",
        f"saves {_ms(gain.gain_ms)} of {_ms(gain.iteration_ms)} an iteration "
        f"({gain.gain_pct:.1f} %), pays back in {payback} of {remaining_iterations} iterations "
        f"left (cost {_ms(proposal.cost_ms)}, {proposal.cost_source}){notes}",
        layout,
        gain.new,
        gain.iteration_ms - gain.gain_ms,
        gain.gain_pct,
        proposal.cost_ms,
    )


def put_rollback(
    trial: Trial, verdict: Verdict, cost_ms: float, cost_source: str, remaining_iterations: int
) -> Decision:
    """Say what a move promised and what it brought.

    Args:
        trial: the move.
        verdict: what was measured.
        cost_ms: wall time of undoing it.
        cost_source: where that number comes from.
        remaining_iterations: to come.
    """
    expected_ms = verdict.measured_ms + verdict.saved_ms
    return Decision(
        "rollback",
        f"the move after iteration {trial.iteration} promised to save "
        f"{_ms(trial.predicted_ms)}, but an iteration takes {_ms(verdict.measured_ms)} where "
        f"{trial.old} would take {_ms(expected_ms)}; undoing it costs {_ms(cost_ms)} "
        f"({cost_source}) with {remaining_iterations} iterations left",
        trial.new,
        trial.old,
        expected_ms,
        -100.0 * verdict.saved_ms / verdict.measured_ms,
        cost_ms,
    )


def _ms(value: float) -> str:
    """Write a duration with three digits or more, never with an exponent."""
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"

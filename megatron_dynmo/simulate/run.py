"""Runs policies over a trace and compares what they make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.simulate.bounds import balanced_ms, ideal_ms
from megatron_dynmo.simulate.pipeline import Boundaries, Case, Move
from megatron_dynmo.simulate.policies import Policy

__all__ = ["Comparison", "Outcome", "compare", "run_policy"]

type Array = NDArray[np.float64]
type Progress = Callable[[str, int, int], None]
"""Called with (policy, iterations done, iterations in all)."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a policy made of a run.

    Attributes:
        policy: its name.
        iteration_ms: [iterations], without moves.
        moves: in order, each charged before its iteration.
        spans: (first row, boundaries) of each split in force, in order.
        peak_memory_bytes: [num_stages] over the run; empty for a yardstick that has no split.
    """

    policy: str
    iteration_ms: Array
    moves: tuple[Move, ...] = ()
    spans: tuple[tuple[int, Boundaries], ...] = ()
    peak_memory_bytes: tuple[float, ...] = ()

    @property
    def moving_ms(self) -> float:
        """Time spent on moves."""
        return sum(move.cost_ms for move in self.moves)

    @property
    def total_ms(self) -> float:
        """The whole run, moves included."""
        return float(self.iteration_ms.sum()) + self.moving_ms


@dataclass(frozen=True, eq=False)
class Comparison:
    """Outcomes of all policies on one case.

    Attributes:
        case: what they ran.
        outcomes: in the order of the policies, then `balanced` and `ideal`.
    """

    case: Case
    outcomes: tuple[Outcome, ...]

    def __getitem__(self, policy: str) -> Outcome:
        """The outcome of a policy."""
        return next(outcome for outcome in self.outcomes if outcome.policy == policy)

    def gpu_hours(self, outcome: Outcome) -> float:
        """GPU-hours of a run."""
        p = self.case.pipeline
        return outcome.total_ms / 3.6e6 * p.num_stages * p.ranks_per_stage

    def speedup_vs_static(self, outcome: Outcome) -> float:
        """Time of the first policy over that of this one."""
        return _ratio(self.outcomes[0].total_ms, outcome.total_ms)

    def fraction_of_ideal(self, outcome: Outcome) -> float:
        """Ideal time over that of this one, at most 1."""
        return _ratio(self["ideal"].total_ms, outcome.total_ms)


def compare(
    case: Case, policies: Sequence[Policy], progress: Progress = lambda *_: None
) -> Comparison:
    """Run every policy on a case; the first one is what the others are compared with.

    Args:
        case: trace and pipeline.
        policies: at least one, each fresh.
        progress: told how far the work is.
    """
    outcomes = [run_policy(case, policy, progress) for policy in policies]
    outcomes.append(Outcome("balanced", balanced_ms(case.trace, case.pipeline)))
    outcomes.append(Outcome("ideal", ideal_ms(case.trace, case.pipeline)))
    return Comparison(case, tuple(outcomes))


def run_policy(case: Case, policy: Policy, progress: Progress = lambda *_: None) -> Outcome:
    """Run one policy from the first iteration of a case to the last.

    Between two looks of the policy nothing changes, so those iterations are timed together once
    it is known how long the split stays.
    """
    num_rows = case.trace.num_iterations
    progress(policy.name, 0, num_rows)
    boundaries = policy.start(case)
    spans, moves = [(0, boundaries)], []
    row = policy.next_look(0)
    while row < num_rows:
        proposal = policy.look(case, row, boundaries)
        if proposal is not None and proposal.boundaries != boundaries:
            move = case.move(boundaries, proposal.boundaries, row, proposal.reason)
            boundaries = proposal.boundaries
            spans.append((row, boundaries))
            moves.append(move)
            policy.moved(move)
        progress(policy.name, row, num_rows)
        following = policy.next_look(row)
        assert following > row, "a policy must let time pass"
        row = following
    ends = [*(begin for begin, _ in spans[1:]), num_rows]
    times, peak = [], np.zeros(case.pipeline.num_stages)
    for (begin, bounds), end in zip(spans, ends, strict=True):
        times.append(case.iteration_ms(bounds, slice(begin, end)))
        peak = np.maximum(peak, case.peak_memory_bytes(bounds, slice(begin, end)))
        progress(policy.name, end, num_rows)
    return Outcome(
        policy.name, np.concatenate(times), tuple(moves), tuple(spans), tuple(peak.tolist())
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 1.0

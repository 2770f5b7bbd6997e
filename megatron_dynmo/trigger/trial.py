"""Whether a move kept its word: measured iterations against those the old layout would have had.

Tier: pure.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger.gain import MEDIAN_LOSS
from megatron_dynmo.trigger.history import Array, View, difference_sd, median

__all__ = ["Trial", "Verdict", "judge"]

_CERTAIN = 2.5  # standard errors between what was measured and what would have been
_TRIAL_WINDOWS = 4  # after which a move that shows neither gain nor loss is let be


@dataclass(frozen=True)
class Trial:
    """A move whose gain was not confirmed yet.

    Attributes:
        old: layout before.
        new: layout that is tried.
        iteration: after which it was adopted.
        predicted_ms: promised gain.
        before: [2, num_layers + 2], the times it was decided by.
        overhead_ms: measured iteration before, less the estimate of it.
        num_before: iterations these two rest on.
    """

    old: LayerLayout
    new: LayerLayout
    iteration: int
    predicted_ms: float
    before: Array
    overhead_ms: float
    num_before: int

    def state(self) -> dict[str, Any]:
        """Everything, as JSON can hold it; layouts as boundaries."""
        return dataclasses.asdict(self) | {
            "old": list(self.old.chunk_boundaries),
            "new": list(self.new.chunk_boundaries),
            "before": self.before.tolist(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], like: LayerLayout) -> Trial:
        """Take over what `state` returned; `like` is any layout of the model."""
        return cls(
            **state
            | {
                "old": like.with_boundaries(state["old"]),
                "new": like.with_boundaries(state["new"]),
                "before": np.array(state["before"]),
            }
        )


@dataclass(frozen=True)
class Verdict:
    """What a trial has shown so far.

    Attributes:
        outcome: `paid`, `lost` or `open`.
        saved_ms: what the move saves an iteration, as measured; negative when it loses.
        error_ms: standard error of that.
        measured_ms: iteration time since the move.
        is_last: whether this is no longer worth waiting for.
    """

    outcome: str
    saved_ms: float
    error_ms: float
    measured_ms: float
    is_last: bool


def judge(trial: Trial, since: View, past: View, old_estimate_ms: float, window: int) -> Verdict:
    """Compare measured iterations since a move with what the old layout would take now.

    Args:
        trial: the move.
        since: iterations measured after it.
        past: all kept iterations, for the noise.
        old_estimate_ms: estimate of an iteration under the old layout by today's costs.
        window: iterations of a window.
    """
    measured_ms = float(median(since.iteration_ms))
    saved_ms = trial.overhead_ms + old_estimate_ms - measured_ms
    noise = difference_sd(past.iteration_ms[:, None], past) * measured_ms
    count = len(since.iteration_ms)
    error_ms = MEDIAN_LOSS * noise * math.sqrt(1 / count + 1 / trial.num_before)
    if saved_ms >= trial.predicted_ms / 2 or saved_ms > _CERTAIN * error_ms:
        outcome = "paid"
    elif saved_ms < -_CERTAIN * error_ms:
        outcome = "lost"
    else:
        outcome = "open"
    is_last = count >= _TRIAL_WINDOWS * window
    return Verdict(outcome, saved_ms, error_ms, measured_ms, is_last)

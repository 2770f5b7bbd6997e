"""From measured windows to a decision: balancer, objective and trigger put together.

Pure arithmetic on numbers that every rank has, so every rank comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_dynmo.balancers import min_max_layout
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.cost import ModelCosts, predict_layout_ms
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.migrator import MigrationReport
from megatron_dynmo.profile_report import ProfileReport
from megatron_dynmo.trigger import Decision


class Decider:
    """Decides for one run.

    Args:
        config: the settings.
        run: a `MegatronRun`, for how long training still goes on.
        layout: layout in force at the start.
    """

    def __init__(self, config: DynMoConfig, run: Any, layout: LayerLayout) -> None:
        self._config = config
        self._run = run
        self._layout = layout

    def decide(self, iteration: int, reports: Sequence[tuple[int, ProfileReport]]) -> Decision:
        """Decide on one window.

        Args:
            iteration: 1-based number of the iteration that ended.
            reports: (iteration, report) of each measured iteration of the window.
        """
        costs = reports[-1][1].costs
        new = choose(costs, self._layout)
        now_ms, new_ms = predict_layout_ms(costs, self._layout), predict_layout_ms(costs, new)
        gain = 100 * (1 - new_ms / now_ms)
        if new == self._layout or gain < self._config.min_gain_pct:
            reason = f"best layout {new} gains {gain:.1f} % (< {self._config.min_gain_pct:g} %)"
            return Decision("stay", reason, self._layout, self._layout, now_ms, gain)
        reason = f"{new} takes {new_ms:.1f} ms instead of {now_ms:.1f} ms an iteration"
        return Decision("move", reason, self._layout, new, new_ms, gain)

    def moved(self, iteration: int, layout: LayerLayout, report: MigrationReport) -> None:
        """Take note of a move that was carried out."""
        self._layout = layout

    def refused(self, iteration: int, layout: LayerLayout, reason: str) -> None:
        """Take note of a move that failed before anything changed."""


def choose(costs: ModelCosts, layout: LayerLayout) -> LayerLayout:
    """The best layout for these costs, near the present one among equals."""
    return min_max_layout(
        costs,
        layout.num_stages,
        virtual_stages=layout.virtual_stages,
        current=layout,
        min_layers=0,
    )

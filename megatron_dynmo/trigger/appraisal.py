"""What layouts are worth now: by measured costs, the ranks' speeds and the price of moving.

Tier: pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dynmo.cost import ModelCosts, predict_layout_ms, stage_costs
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger.decision import Proposal, TriggerSettings
from megatron_dynmo.trigger.gain import (
    Calibration,
    Gain,
    Placement,
    average_gain,
    ratio_tolerance,
    window_gain,
)
from megatron_dynmo.trigger.history import Array, History, View, median, owners
from megatron_dynmo.trigger.learning import MoveCost
from megatron_dynmo.trigger.speeds import RankSpeeds

__all__ = ["Appraiser", "Choose", "Present"]

Choose = Callable[[ModelCosts, LayerLayout, tuple[float, ...]], LayerLayout]
"""The balancer: costs on a healthy rank, the present layout, relative speed of every pp_rank."""

_KEPT_WINDOWS = 16


@dataclass(frozen=True)
class Present:
    """What one decision sees.

    Attributes:
        iteration: last one completed.
        remaining: iterations to come.
        announced: whether an announced change takes effect with the next iteration.
        measured: iterations under this layout and these ranks, as measured.
        segment: the same with announced changes applied.
        past: all kept iterations, announced changes applied.
        window: the newest of `segment`.
        calibration: of estimates against the window.
    """

    iteration: int
    remaining: int
    announced: bool
    measured: View
    segment: View
    past: View
    window: View
    calibration: Calibration

    @cached_property
    def tolerance(self) -> float:
        """Relative change of a layer that noise may cause."""
        return ratio_tolerance(self.past, len(self.window.times))


class Appraiser:
    """Measures and learned costs of one run, and what they say of a layout.

    Args:
        settings: what the user set.
        choose: the balancer.

    Attributes:
        layout: in force.
        history: measured iterations.
        speeds: slowness of the ranks.
        move_cost: what moves cost.
    """

    def __init__(self, settings: TriggerSettings, choose: Choose) -> None:
        self._settings = settings
        self._choose = choose
        self.layout: LayerLayout | None = None
        self.history = History(_KEPT_WINDOWS * settings.window)
        self.speeds = RankSpeeds(0)
        self.move_cost = MoveCost()

    def present_layout(self) -> LayerLayout:
        """The layout in force, which `Trigger.start` has set."""
        assert self.layout is not None, "start() comes first"
        return self.layout

    def look(self, iteration: int, remaining: int) -> Present:
        """Gather what a decision sees.

        Args:
            iteration: last one completed.
            remaining: iterations to come.
        """
        history, size = self.history, self._settings.window
        past, count = history.view(iteration), history.num_in_segment
        segment = past.last(count)
        measured = segment
        if history.has_hints:
            measured = history.view(iteration, with_hints=False).last(count)
        newest = measured.last(size)
        estimate_ms = self.estimate_ms(median(newest.times), self.present_layout())
        return Present(
            iteration=iteration,
            remaining=remaining,
            announced=history.hint_starts(iteration),
            measured=measured,
            segment=segment,
            past=past,
            window=segment.last(size),
            calibration=Calibration.of(float(median(newest.iteration_ms)), estimate_ms),
        )

    # ---------------------------------------------------------------- layouts to move to

    def window_proposal(self, present: Present) -> Proposal:
        """The best layout for the window."""
        best = self._best(median(present.window.times))
        note = "ahead of an announced change" if present.announced else ""
        gain = self._exact(self.window_gain(present, best))
        return self._price(gain, present.remaining, note)

    def average_proposal(self, present: Present) -> Proposal:
        """The best layout for the average of all iterations since the last move."""
        now = self._placement(self.present_layout())
        then = self._placement(self._best(present.segment.times.mean(axis=0)))
        gain = average_gain(
            present.segment,
            self._settings.window,
            now,
            then,
            self._num_microbatches,
            present.calibration,
        )
        note = f"on average of {gain.span} iterations"
        return self._price(self._exact(gain), present.remaining, note)

    def half_step(self, full: Proposal, present: Present) -> Proposal | None:
        """Half of the way, where the gain is hardly above its noise and half of it is had so."""
        middle = _half_way(self.present_layout(), full.gain.new)
        is_step = middle not in (self.present_layout(), full.gain.new)
        if full.gain.sure_ms >= full.gain.margin_ms or not is_step or not self._fits(middle):
            return None
        gain = self._exact(self.window_gain(present, middle))
        half = self._price(gain, full.horizon, f"half-way to {full.gain.new}")
        return half if 2 * gain.gain_ms >= full.gain.gain_ms else None

    def window_gain(self, present: Present, layout: LayerLayout) -> Gain:
        """First look at what a layout would save by the window."""
        now, then = self._placement(self.present_layout()), self._placement(layout)
        microbatches, calibration = self._num_microbatches, present.calibration
        return window_gain(present.window, present.past, now, then, microbatches, calibration)

    def estimate_ms(self, times: Array, layout: LayerLayout) -> float:
        """Estimated iteration by times [2, num_layers + 2] as they are under that layout."""
        place = Placement(layout, np.ones(times.shape[1]))
        return float(place.estimate_ms(times.sum(axis=0)[None], self._num_microbatches)[0])

    def cost_of(self, layout: LayerLayout, iteration_ms: float) -> tuple[float, str]:
        """Expected ms of a move from here, and where the number comes from."""
        assert self.history.costs is not None
        moved = owners(layout) != owners(self.present_layout())
        layers = self.history.costs.layers
        num_bytes = sum(layers[i].memory_bytes for i in np.flatnonzero(moved).tolist())
        return self.move_cost.estimate(num_bytes, iteration_ms)

    # ---------------------------------------------------------------- pieces

    @property
    def _num_microbatches(self) -> int:
        assert self.history.costs is not None
        return self.history.costs.num_microbatches

    def _placement(self, layout: LayerLayout) -> Placement:
        return Placement(layout, self.speeds.layer_factors(layout, self.present_layout()))

    def _best(self, times: Array) -> LayerLayout:
        """What the balancer proposes for these times."""
        costs = self.base_costs(times)
        return self._choose(costs, self.present_layout(), self.speeds.speeds)

    def base_costs(self, times: Array) -> ModelCosts:
        """Costs on a healthy rank of layers that take these times where they are now."""
        return self.history.model_costs(times * self.speeds.base_factors(self.present_layout()))

    def _exact(self, gain: Gain) -> Gain:
        """Replace the first look at a gain that counts by the prediction from the schedule."""
        if gain.gain_pct < self._settings.min_gain_pct or gain.sure_ms <= 0 or not gain.agrees:
            return gain
        old_ms, new_ms = (
            predict_layout_ms(self.history.model_costs(gain.times * place.factors), place.layout)
            for place in (self._placement(self.present_layout()), self._placement(gain.new))
        )
        return gain.with_prediction(old_ms, new_ms)

    def _price(self, gain: Gain, horizon: float, note: str) -> Proposal:
        cost_ms, source = self.cost_of(gain.new, gain.iteration_ms)
        return Proposal(gain, cost_ms, source, horizon, note)

    def _fits(self, layout: LayerLayout) -> bool:
        """Whether a half-step keeps to the memory limit; unknown, hence no, when interleaved."""
        cap, costs = self._settings.memory_cap_bytes, self.history.costs
        assert costs is not None
        if cap is None or layout.virtual_stages > 1:
            return cap is None
        in_flight = [
            min(costs.num_microbatches, layout.num_stages - s) for s in range(layout.num_stages)
        ]
        return all(
            stage.memory_bytes + count * stage.activation_bytes <= cap
            for stage, count in zip(stage_costs(costs, layout), in_flight, strict=True)
        )


def _half_way(old: LayerLayout, new: LayerLayout) -> LayerLayout:
    """Every boundary half of its way, the odd layer rounded towards the new place."""
    return old.with_boundaries(
        [
            a + (b - a + (1 if b > a else 0)) // 2
            for a, b in zip(old.chunk_boundaries, new.chunk_boundaries, strict=True)
        ]
    )

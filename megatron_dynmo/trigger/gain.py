"""What another layout would save an iteration, and how sure that is.

The margin answers one question: how large a gain could noise alone have shown? The spread of the
gain is measured on the gain itself, iteration by iteration over the kept history, so that noise
common to a rank's layers counts as it acts. Differences of successive iterations are used, on which
a drift leaves no trace, and a step a single large one, which is left out; a spike leaves two.
Nothing else is assumed about the distribution: the plain root mean square is taken, which rare
spikes push up. Because the layout was chosen as the best of
many, the margin is 3 standard errors and as many as the largest of num_stages random numbers is
expected to reach. Tier: pure.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger.history import (
    Array,
    View,
    iteration_estimate_ms,
    median,
    owners,
    rank_loads,
)

__all__ = [
    "MEDIAN_LOSS",
    "Calibration",
    "Gain",
    "Placement",
    "average_gain",
    "ratio_tolerance",
    "window_gain",
]

MEDIAN_LOSS = 1.25  # standard error of a median over that of a mean, for normal noise
_ENOUGH_TO_TRIM = 8
_LEAST_TOLERANCE = 0.05  # ratios of times nearer than this are never told apart


@dataclass(frozen=True)
class Placement:
    """A layout and what becomes of times measured under the present one when it is adopted.

    Attributes:
        layout: the layout.
        factors: [num_layers + 2], by the slowness of ranks.
    """

    layout: LayerLayout
    factors: Array

    def estimate_ms(self, totals: Array, num_microbatches: int) -> Array:
        """[n], iteration times from totals [n, num_layers + 2] as measured at present."""
        return iteration_estimate_ms(totals * self.factors, self.layout, num_microbatches)


@dataclass(frozen=True)
class Calibration:
    """How measured iterations compare with the estimate under the same layout and costs.

    Attributes:
        scale: below 1 where the costs claim more time than was measured.
        overhead_ms: measured time that the costs do not explain and no move changes.
    """

    scale: float
    overhead_ms: float

    @classmethod
    def of(cls, measured_ms: float, estimate_ms: float) -> Calibration:
        """Compare; one of scale and overhead stays at rest."""
        scale = min(1.0, measured_ms / estimate_ms) if estimate_ms > 0 else 0.0
        return cls(scale, max(0.0, measured_ms - estimate_ms))


@dataclass(frozen=True)
class Gain:
    """What a layout would save.

    Attributes:
        new: the layout.
        times: [2, num_layers + 2], the times it is judged by, as measured at present.
        gain_ms: saved an iteration; negative when it would lose.
        margin_ms: gain that noise alone may show.
        agrees: whether the iterations agree that there is a gain.
        iteration_ms: as measured, or expected once announced changes are in effect.
        span: iterations it rests on.
    """

    new: LayerLayout
    times: Array
    gain_ms: float
    margin_ms: float
    agrees: bool
    iteration_ms: float
    span: int

    @property
    def gain_pct(self) -> float:
        """Share of the iteration that is saved, in percent."""
        return 100.0 * self.gain_ms / self.iteration_ms if self.iteration_ms > 0 else 0.0

    @property
    def sure_ms(self) -> float:
        """What is saved at least."""
        return self.gain_ms - self.margin_ms

    def with_prediction(self, old_ms: float, new_ms: float) -> Gain:
        """The same with the gain of two full predictions, when that is smaller.

        A model that claims more time than was measured is scaled down to what was.
        """
        scale = min(1.0, self.iteration_ms / old_ms) if old_ms > 0 else 0.0
        return dataclasses.replace(self, gain_ms=min(self.gain_ms, (old_ms - new_ms) * scale))


def window_gain(
    window: View,
    past: View,
    now: Placement,
    then: Placement,
    num_microbatches: int,
    calibration: Calibration,
) -> Gain:
    """Gain by the medians of a window; all of its iterations but one in five must agree.

    Args:
        window: the iterations to decide by.
        past: all kept iterations, for the noise.
        now: the present layout.
        then: the layout to judge.
        num_microbatches: micro-batches of an iteration.
        calibration: of the estimate.
    """
    times = median(window.times)
    central = times.sum(axis=0)[None]
    old_ms = float(now.estimate_ms(central, num_microbatches)[0])
    gain_ms = (old_ms - float(then.estimate_ms(central, num_microbatches)[0])) * calibration.scale
    iteration_ms = old_ms * calibration.scale + calibration.overhead_ms
    count = len(window.times)
    if gain_ms <= 0:  # which is how most windows end: no need to know the noise
        return Gain(then.layout, times, gain_ms, 0.0, False, iteration_ms, count)
    each = np.sort(_gains(window, now, then, num_microbatches))
    spread, num_differences = _spread(past, now, then, num_microbatches)
    spread = max(spread, _floor(past, central[0], now, then, num_microbatches))
    error = spread * (MEDIAN_LOSS if count > 2 else 1.0) / math.sqrt(count)
    return Gain(
        new=then.layout,
        times=times,
        gain_ms=gain_ms,
        margin_ms=_num_errors(now.layout.num_stages, num_differences) * error * calibration.scale,
        agrees=bool(each[count // 5] > 0),
        iteration_ms=iteration_ms,
        span=count,
    )


def average_gain(
    segment: View,
    block: int,
    now: Placement,
    then: Placement,
    num_microbatches: int,
    calibration: Calibration,
) -> Gain:
    """Gain on average over many iterations, replayed one by one under both layouts.

    This finds small gains in much noise, and the best compromise for a load that swings.

    Args:
        segment: iterations under the present layout.
        block: iterations whose mean counts as one independent value, if that is the wider view.
        now: the present layout.
        then: the layout to judge.
        num_microbatches: micro-batches of an iteration.
        calibration: of the estimate.
    """
    gains = _gains(segment, now, then, num_microbatches)
    count = len(gains)
    blocks = gains[count % block :].reshape(-1, block).mean(axis=1)
    error = max(
        float(gains.std(ddof=1)) / math.sqrt(count),
        float(blocks.std(ddof=1)) / math.sqrt(len(blocks)),
    )
    old_ms = float(now.estimate_ms(segment.totals, num_microbatches).mean())
    return Gain(
        new=then.layout,
        times=segment.times.mean(axis=0),
        gain_ms=float(gains.mean()) * calibration.scale,
        margin_ms=_num_errors(now.layout.num_stages, len(blocks) - 1) * error * calibration.scale,
        agrees=True,
        iteration_ms=old_ms * calibration.scale + calibration.overhead_ms,
        span=count,
    )


def ratio_tolerance(past: View, window: int) -> float:
    """Relative change of a layer's median over a window that noise may cause."""
    return max(
        _LEAST_TOLERANCE,
        4.0 * math.sqrt(2.0) * MEDIAN_LOSS * past.layer_noise / math.sqrt(window),
    )


# -------------------------------------------------------------------- noise


def _gains(view: View, now: Placement, then: Placement, num_microbatches: int) -> Array:
    """[n], the gain in each single iteration."""
    totals = view.totals
    old, new = (p.estimate_ms(totals, num_microbatches) for p in (now, then))
    return np.asarray(old - new)


def _spread(
    past: View, now: Placement, then: Placement, num_microbatches: int
) -> tuple[float, int]:
    """Standard deviation of the gain in one iteration, and the differences it rests on."""
    steps = np.diff(_gains(past, now, then, num_microbatches))[~past.is_first_of_segment[1:]]
    if not steps.size:
        return math.inf, 0
    squares = np.sort(steps * steps)
    if squares.size >= _ENOUGH_TO_TRIM:
        squares = squares[:-1]
    return math.sqrt(float(squares.mean()) / 2), squares.size


def _floor(
    past: View, central: Array, now: Placement, then: Placement, num_microbatches: int
) -> float:
    """Spread to expect from the noise of single layers; few iterations may be alike by chance."""
    heavy = [
        owners(p.layout) == int(rank_loads(central[None] * p.factors, p.layout)[0].argmax())
        for p in (now, then)
    ]
    differing = central[:-2][heavy[0] != heavy[1]]
    return num_microbatches * past.layer_noise * math.sqrt(float(np.sum(differing * differing)))


def _num_errors(num_stages: int, num_differences: int) -> float:
    """Standard errors that a gain must exceed; more while the noise itself is hardly known."""
    best_of_many = round(math.sqrt(2 * math.log(max(num_stages, 2))), 2)
    return (3.0 + best_of_many) * (1.0 + 3.0 / max(num_differences, 1))

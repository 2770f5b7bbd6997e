"""Numbers that follow the iteration: constant, listed, in steps, on a ramp, oscillating.

Pure data without expressions, so that an emulation file can hold them and no rank can disagree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_dynmo.emulate.fields import check_object, number
from megatron_dynmo.errors import ConfigError

__all__ = ["Constant", "Listed", "Oscillation", "OverTime", "Ramp", "Steps", "over_time"]


class OverTime(Protocol):
    """A number for every iteration."""

    def at(self, iteration: int) -> float:
        """Return the number of an iteration (1-based)."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same number always."""

    value: float

    def at(self, iteration: int) -> float:
        """Return the number."""
        return self.value


@dataclass(frozen=True)
class Listed:
    """One number for each iteration from the first on; the last one stays in force."""

    values: tuple[float, ...]

    def at(self, iteration: int) -> float:
        """Return the number of an iteration."""
        return self.values[min(max(iteration, 1), len(self.values)) - 1]


@dataclass(frozen=True)
class Steps:
    """Piecewise constant.

    Attributes:
        starts: iterations from which the values hold, ascending, the first being 1.
        values: one for each start.
    """

    starts: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, iteration: int) -> float:
        """Return the number of an iteration."""
        return self.values[max(bisect_right(self.starts, iteration), 1) - 1]


@dataclass(frozen=True)
class Ramp:
    """`before` up to the first iteration, `after` from the last one on, linear in between."""

    first_iteration: int
    last_iteration: int
    before: float
    after: float

    def at(self, iteration: int) -> float:
        """Return the number of an iteration."""
        if iteration <= self.first_iteration:
            return self.before
        if iteration >= self.last_iteration:
            return self.after
        length = self.last_iteration - self.first_iteration
        return (
            self.before + (self.after - self.before) * (iteration - self.first_iteration) / length
        )


@dataclass(frozen=True)
class Oscillation:
    """A square wave that begins low: half a period low, half a period high."""

    low: float
    high: float
    period_iters: int

    def at(self, iteration: int) -> float:
        """Return the number of an iteration."""
        is_low = (iteration - 1) % self.period_iters < self.period_iters // 2
        return self.low if is_low else self.high


def over_time(value: Any, where: str, *, is_positive: bool = False) -> OverTime:
    """Read a number over iterations as an emulation file writes it.

    Args:
        value: a number, a list of numbers, or an object with `kind` step, ramp or oscillation.
        where: its place in the file, for errors.
        is_positive: whether every number must be above 0 instead of at least 0.

    Raises:
        ConfigError: names the place, what it holds and what it must hold.
    """

    def one(value: Any, name: str = "") -> float:
        return number(value, where + name, is_positive=is_positive)

    if isinstance(value, list):
        if not value:
            raise ConfigError(f"{where} is an empty list, must hold a number for each iteration")
        return Listed(tuple(one(item, f"[{index}]") for index, item in enumerate(value)))
    if not isinstance(value, dict):
        return Constant(one(value))
    readers: dict[str, Callable[..., OverTime]] = {
        "step": _steps,
        "ramp": _ramp,
        "oscillation": _oscillation,
    }
    kind = value.get("kind")
    if kind not in readers:
        raise ConfigError(f"{where}.kind is {kind!r}, must be one of {', '.join(readers)}")
    return readers[kind]({k: v for k, v in value.items() if k != "kind"}, where, one)


def _steps(fields: dict[str, Any], where: str, one: Callable[..., float]) -> Steps:
    """Read `{"kind": "step", "from": {"1": 1.0, "50": 3.0}}`."""
    check_object(fields, where, required=("from",))
    rows = fields["from"]
    if not isinstance(rows, dict) or "1" not in rows:
        raise ConfigError(
            f'{where}.from must be an object of iteration: number that begins with "1", is {rows!r}'
        )
    steps = {}
    for text, value in rows.items():
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{where}.from has {text!r}, must be an iteration of at least 1")
        steps[int(text)] = one(value, f".from.{text}")
    starts = tuple(sorted(steps))
    return Steps(starts, tuple(steps[start] for start in starts))


def _ramp(fields: dict[str, Any], where: str, one: Callable[..., float]) -> Ramp:
    """Read `{"kind": "ramp", "first_iteration", "last_iteration", "before", "after"}`."""
    names = ("first_iteration", "last_iteration", "before", "after")
    check_object(fields, where, required=names)
    first, last = (int(number(fields[n], f"{where}.{n}", is_whole=True)) for n in names[:2])
    if last <= first:
        raise ConfigError(
            f"{where}.last_iteration is {last}, must be after first_iteration, which is {first}"
        )
    return Ramp(first, last, one(fields["before"], ".before"), one(fields["after"], ".after"))


def _oscillation(fields: dict[str, Any], where: str, one: Callable[..., float]) -> Oscillation:
    """Read `{"kind": "oscillation", "low", "high", "period_iters"}`."""
    check_object(fields, where, required=("low", "high", "period_iters"))
    period = int(number(fields["period_iters"], f"{where}.period_iters", is_whole=True))
    if period < 2:
        raise ConfigError(f"{where}.period_iters is {period}, must be at least 2")
    return Oscillation(one(fields["low"], ".low"), one(fields["high"], ".high"), period)

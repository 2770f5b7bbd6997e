"""The scenarios by name, and their settings from text."""

from __future__ import annotations

import difflib
import math
from dataclasses import fields

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.scenarios import (
    EarlyExit,
    ExpertRouting,
    GradualPruning,
    LayerFreezing,
    MixtureOfDepths,
    Scenario,
    SparseAttention,
)

__all__ = ["SCENARIOS", "make_scenario"]

SCENARIOS: dict[str, type[Scenario]] = {
    kind.name: kind
    for kind in (
        ExpertRouting,
        GradualPruning,
        LayerFreezing,
        SparseAttention,
        EarlyExit,
        MixtureOfDepths,
    )
}


def make_scenario(name: str, settings: dict[str, str] | None = None) -> Scenario:
    """Make a scenario from its name and the fields to set, as text.

    Raises:
        ConfigError: an unknown name or field, or text that is no number in range.
    """
    if name not in SCENARIOS:
        raise ConfigError(f"unknown scenario {name!r}; {_near(name, list(SCENARIOS))}")
    kind, values = SCENARIOS[name], {}
    known: dict[str, type] = {field.name: type(field.default) for field in fields(kind)}
    for key, text in (settings or {}).items():
        if key not in known:
            raise ConfigError(f"{name} has no setting {key!r}; {_near(key, list(known))}")
        try:
            values[key] = known[key](text)
        except ValueError:
            whole = "a whole number" if known[key] is int else "a number"
            raise ConfigError(f"{name}: {key} is {text!r}, must be {whole}") from None
    scenario = kind(**values)
    _check_ranges(scenario)
    return scenario


_AT_MOST_ONE = (
    "begin", "end", "warm_up", "capacity", "final_fraction", "final_survival", "first_exit",
    "initial_sparsity", "final_sparsity",
)  # fmt: skip
_ABOVE_ZERO = ("correlation", "final_survival")


def _check_ranges(scenario: Scenario) -> None:
    """Refuse settings under which an equation means nothing."""
    for field in fields(scenario):
        name, value = field.name, getattr(scenario, field.name)
        if name == "depth_trend" and math.isfinite(value):
            continue
        least = 1 if isinstance(field.default, int) else 0
        most = 1.0 if name in _AT_MOST_ONE else math.inf
        above = name in _ABOVE_ZERO and value <= 0
        if above or not (least <= value <= most) or not math.isfinite(value):
            bounds = f"{'above' if above else 'at least'} {least}"
            bounds += " and at most 1" if most == 1.0 else ""
            raise ConfigError(f"{scenario.name}: {name} is {value}, must be {bounds}")
    begin, end = getattr(scenario, "begin", 0.0), getattr(scenario, "end", 1.0)
    if begin > end:
        raise ConfigError(
            f"{scenario.name}: begin {begin} is after end {end}; set end to {begin} or more"
        )


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"

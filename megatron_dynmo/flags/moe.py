"""Flags about the load of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags import flag
from megatron_dynmo.flags.group import FlagGroup

# Settings of each kind of skew with their defaults.
_SETTINGS: dict[str, dict[str, float]] = {
    "uniform": {},
    "zipf": {"exponent": 1.0},
    "drift": {"hot": 1.0, "share": 0.5, "period": 10.0},
    "phases": {"exponent": 1.5, "period": 20.0},
}


@dataclass(frozen=True)
class SkewSpec:
    """A workload of skewed routing, for tests and benchmarks.

    Attributes:
        kind: uniform, zipf, drift or phases.
        exponent: of Zipf's law (zipf), or its largest value (phases).
        hot: neighbouring experts that are hot at a time (drift).
        share: part of the tokens that want a hot expert (drift).
        period: iterations until the hot experts have moved on by one (drift), or until the skew of
            a layer has come and gone (phases).
    """

    kind: str
    exponent: float = 0.0
    hot: int = 0
    share: float = 0.0
    period: float = 0.0

    @classmethod
    def parse(cls, text: str) -> SkewSpec:
        """Read `KIND[:NAME=NUMBER[,NAME=NUMBER...]]`.

        Raises:
            ConfigError: Names what is wrong and what is known.
        """
        kind, _, rest = text.partition(":")
        if kind not in _SETTINGS:
            raise ConfigError(
                f"--dynmo-moe-skew: '{kind}' is not known; use {', '.join(_SETTINGS)}"
            )
        values = dict(_SETTINGS[kind])
        for piece in filter(None, rest.split(",")):
            name, _, number = piece.partition("=")
            if name.strip() not in values:
                raise ConfigError(
                    f"--dynmo-moe-skew: {kind} has no setting '{name.strip()}'; it has "
                    f"{', '.join(values) or 'none'}"
                )
            values[name.strip()] = _positive(name.strip(), number)
        if values.get("share", 0.0) > 1:
            raise ConfigError(
                f"--dynmo-moe-skew: share is a part of the tokens, at most 1, got {values['share']}"
            )
        hot = int(values.pop("hot", 0))
        return cls(kind, hot=hot, **values)


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf or (name == "hot" and value != int(value)):
        wanted = "a whole number above 0" if name == "hot" else "a number above 0"
        raise ConfigError(f"--dynmo-moe-skew: {name} must be {wanted}, got '{text}'")
    return value


@dataclass(frozen=True)
class MoeFlags(FlagGroup):
    """Whether the load of experts is counted, and what it is made of in tests."""

    kind: ClassVar[str | None] = "moe"

    moe: bool = flag(
        False, "count the tokens of experts, by layer, and how uneven they are over ranks"
    )
    moe_skew: str = flag(
        "",
        "tests and benchmarks only: bias the router of every MoE layer to a known skew, the same "
        "for every layout: uniform, zipf, drift or phases, with NAME=NUMBER after a colon "
        "(docs/dynamics/moe.md)",
        metavar="TEXT",
    )

    def is_on(self) -> bool:
        """Whether routers are looked at."""
        return self.moe or bool(self.moe_skew)

    def check(self) -> None:
        """See `FlagGroup.check`."""
        if self.moe_skew:
            SkewSpec.parse(self.moe_skew)

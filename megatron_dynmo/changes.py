"""What the dynamics changed after a step, as the log and the trigger want to know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Changes:
    """What the dynamics did after a step; the same on all ranks.

    Attributes:
        events: (kind, fields of its `dynamics` event).
        hints: see `announced`.
        has_reformed: whether parameters were frozen, thawed, replaced or resized.
    """

    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    hints: tuple[tuple[int, float, float], ...] = ()
    has_reformed: bool = False


def announced(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
) -> list[tuple[int, float, float]]:
    """What changed in the layers' expected costs.

    Returns:
        (layer_number, forward, backward): new time over old time of each layer that differs.
    """
    return [
        (number, _ratio(new[0], old[0]), _ratio(new[1], old[1]))
        for number, (old, new) in enumerate(zip(before, after, strict=True), start=1)
        if old != new
    ]


def _ratio(new: float, old: float) -> float:
    """New over old time; a pass that took none and takes some again counts as unchanged."""
    return new / old if old > 0 else 1.0

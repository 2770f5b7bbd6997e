"""One line for people for each change that a dynamic made."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["dynamics_line"]

_LONGEST = 160


def dynamics_line(iteration: int, kind: str, what: Mapping[str, Any]) -> str:
    """Return the fields of a `dynamics` event in short.

    ` dynmo iteration      8 | freezing: frozen 1..4, embedding yes`

    Args:
        iteration: 1-based number of the iteration that ended.
        kind: of the dynamic.
        what: fields of the event; tables, as MoE has them, are left to the event.
    """
    words = [
        f"{name.replace('_', ' ')} {text}"
        for name, value in what.items()
        if (text := _short(value)) is not None
    ]
    line = f" dynmo iteration {iteration:6d} | {kind.replace('_', ' ')}: {', '.join(words)}"
    return line if len(line) <= _LONGEST else line[: _LONGEST - 4] + " ..."


def _short(value: Any) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        parts = [f"{name} {text}" for name, v in value.items() if (text := _short(v)) is not None]
        return f"({', '.join(parts)})"
    if isinstance(value, Sequence) and not any(isinstance(one, Mapping | list) for one in value):
        return _run(value)
    return None


def _run(values: Sequence[Any]) -> str:
    """`1..4` for numbers in a row, `4 x3, 16 x2` for repeated ones."""
    if not values:
        return "none"
    numbers = list(values)
    if all(isinstance(one, int) for one in numbers) and len(numbers) > 2:
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{numbers[0]}..{numbers[-1]}"
    counted = ((one, len(list(same))) for one, same in itertools.groupby(numbers))
    return " ".join(f"{_short(one)}" + (f" x{n}" if n > 1 else "") for one, n in counted)

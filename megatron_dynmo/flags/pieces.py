"""Flags whose text is a list of pieces by iteration, `ITER:WHAT;ITER:WHAT...`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from megatron_dynmo.errors import ConfigError


def pieces(text: str) -> list[str]:
    """The pieces between semicolons, without blanks around them; empty ones do not count."""
    return [piece.strip() for piece in text.split(";") if piece.strip()]


def require_increasing(flag: str, iterations: Iterable[int]) -> None:
    """Refuse iterations that do not increase from piece to piece.

    Raises:
        ConfigError: Names the flag and the first two that do not.
    """
    for earlier, later in itertools.pairwise(iterations):
        if later <= earlier:
            raise ConfigError(f"{flag}: iterations must increase, but {later} follows {earlier}")

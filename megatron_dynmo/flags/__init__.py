"""How a `--dynmo-*` flag is declared: one field of a frozen dataclass, with its help and parser.

`DynMoConfig` inherits the groups of this package, so that every field stays one flag of one config.
Pure: read before torch or Megatron is imported.
"""

from __future__ import annotations

import argparse
from dataclasses import field
from typing import Any

__all__ = [
    "auto_or_count",
    "count",
    "flag",
    "fraction",
    "gigabytes",
    "non_negative",
    "number",
    "percent",
    "positive_fraction",
    "whole",
]


def flag(default: Any, help: str, *, only_with: tuple[str, ...] = (), **kwargs: Any) -> Any:
    """Declare a config field together with its command line flag.

    Args:
        default: value without the flag.
        help: text of `--help`.
        only_with: values of the first flag of the group with which this one has an effect; none
            for all.
        **kwargs: further words for `argparse.ArgumentParser.add_argument`.
    """
    return field(
        default=default, metadata={"help": help, "only_with": only_with, "argparse": kwargs}
    )


def auto_or_count(text: str) -> int | None:
    """Parse 'auto' (None) or a whole number >= 1."""
    if text == "auto":
        return None
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 'auto' or at least 1, got {text}")
    return value


def count(text: str) -> int:
    """Parse a whole number >= 1."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def non_negative(text: str) -> int:
    """Parse a whole number >= 0."""
    value = whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value


def positive_fraction(text: str) -> float:
    """Parse a number above 0 and up to 1."""
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def percent(text: str) -> float:
    """Parse a percentage >= 0."""
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a percentage >= 0, got {text}")
    return value


def gigabytes(text: str) -> float:
    """Parse a positive number of GB."""
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of GB, got {text}")
    return value


def whole(text: str) -> int:
    """Parse a whole number; argparse would answer a ValueError with the name of our function."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got '{text}'") from None


def number(text: str) -> float:
    """Parse a number, as above."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got '{text}'") from None

"""The letters of Megatron's layout language: how they repeat, and which stand where.

Tier: pure.

Source: megatron/core/transformer/pipeline_parallel_layer_layout.py@core_v0.19.2
"""

from __future__ import annotations

import re

from megatron_dynmo.errors import LayoutError

__all__ = ["check_letters", "expand", "repeat"]

# The grammar has two rewriting rules, applied once each and in this order.
_REPEATED_GROUP = re.compile(r"\((?P<body>[^)]+)\)\*(?P<times>\d+)")
_REPEATED_LETTER = re.compile(r"(?P<body>.)\*(?P<times>\d+)")
_LETTERS = {"E": "embedding", "t": "transformer layer", "m": "MTP layer", "L": "loss"}
_MAX_EXPANDED_LENGTH = 1_000_000  # a typing slip such as t*99999999999 must not eat the memory


def repeat(letter: str, times: int) -> str:
    """Shortest way to write a run of one letter."""
    return letter * times if times < 3 else f"{letter}*{times}"


def expand(text: str) -> str:
    """Apply the repetitions: first of groups, then of single letters, as Megatron does."""
    expanded = text.replace(",", "")
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):
        length = sum(len(m["body"]) * int(m["times"]) for m in pattern.finditer(expanded))
        if length > _MAX_EXPANDED_LENGTH:
            raise LayoutError(f"the layout {text!r} repeats to {length} letters: check its counts")
        expanded = pattern.sub(lambda m: m["body"] * int(m["times"]), expanded)
    return expanded


def check_letters(chunks: list[str], text: str) -> None:
    """Refuse unknown letters, and E or L missing, repeated or in the wrong place."""
    flat = "".join(chunks)
    unknown = sorted(set(flat) - set(_LETTERS))
    if unknown:
        known = ", ".join(f"{letter} ({meaning})" for letter, meaning in _LETTERS.items())
        raise LayoutError(
            f"unknown letters {' '.join(map(repr, unknown))} in the layout {text!r}; known: "
            f"{known}, | between chunks, x*n and (..)*n to repeat (groups do not nest)"
        )
    for letter in "EL":
        if flat.count(letter) != 1:
            raise LayoutError(
                f"{flat.count(letter)} {letter} ({_LETTERS[letter]}) in the layout {text!r}: "
                "exactly 1 is needed"
            )
    if not flat.startswith("E"):
        raise LayoutError(f"E (embedding) must be the first letter of the layout {text!r}")
    if not flat.endswith("L"):
        raise LayoutError(f"L (loss) must be the last letter of the layout {text!r}")

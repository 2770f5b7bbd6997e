"""A part of `--split` that holds no document, over which Megatron would count epochs for ever.

`GPTDataset` adds up tokens, one epoch at a time, until there are as many as were asked for. From no
document that is never, with no message, even when not one sample was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dynmo.errors import ConfigError

_PARTS = ("training", "validation", "test")

# An .idx file begins with 9 bytes of magic, 8 of version, 1 of token type; then comes the count.
# Source: megatron/core/datasets/indexed_dataset.py@core_v0.19.0
_COUNT_OFFSET_BYTES = 18
_COUNT_BYTES = 8


def require_documents(config: Any, num_samples: Sequence[int | None]) -> None:
    """Refuse a split that leaves a part without documents.

    Args:
        config: A GPTDatasetConfig.
        num_samples: Samples wanted for training, validation and test; None is one pass.

    Raises:
        ConfigError: Names the data, its number of documents, and a split that works.
    """
    if config.mock or config.blend is None:
        return
    prefixes, weights = config.blend
    is_counted = weights is not None or len(prefixes) == 1
    for prefix in prefixes if is_counted else ():
        num_documents = _num_documents(prefix)
        if num_documents is None:
            continue
        empty = [
            index
            for index, bounds in enumerate(config.split_matrix)
            if bounds is not None
            and num_samples[index] is not None
            and _length(bounds, num_documents) == 0
        ]
        if empty:
            raise ConfigError(_message(prefix, num_documents, config.split, empty))


def _length(bounds: tuple[float, float], num_documents: int) -> int:
    """Number of documents between two fractions, rounded as Megatron does."""
    begin, end = (round(bound * float(num_documents)) for bound in bounds)
    return end - begin


def _num_documents(prefix: str) -> int | None:
    """Read how many documents a data set has; None if it is not a file on this machine."""
    path = Path(f"{prefix}.idx")
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(_COUNT_OFFSET_BYTES)
        return int.from_bytes(file.read(_COUNT_BYTES), "little")


def _message(prefix: str, num_documents: int, split: str, empty: Sequence[int]) -> str:
    if num_documents == 0:
        return f"{prefix} holds no document; give another --data-path"
    names = " and ".join(_PARTS[index] for index in empty)
    return (
        f"--split {split} leaves no document of {prefix} (it has {num_documents}) for {names}, and "
        f"Megatron would search for one for ever; use --split {_without(split, empty)}, "
        "or data of more documents"
    )


def _without(split: str, empty: Sequence[int]) -> str:
    """Return the split with nothing for the empty parts; all for training if that was one."""
    if 0 in empty:
        return "100,0,0"
    shares = [*re.findall(r"[.0-9]+", split), "0", "0"]
    return ",".join("0" if index in empty else shares[index] for index in range(len(_PARTS)))

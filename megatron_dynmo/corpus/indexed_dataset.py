"""Writes Megatron's `.bin/.idx` dataset: the file format alone.

The format is written with numpy because importing `megatron.core` to reach its own builder costs
more than tokenizing ten megabytes. Tests compare the bytes with those of that builder.
"""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_DTYPE_CODES = {"<u2": 8, "<i4": 4}
_FIRST_VOCAB_SIZE_OF_INT32 = 65500


def token_dtype(vocab_size: int) -> str:
    """Return the numpy type of the stored tokens, by Megatron's own rule.

    Args:
        vocab_size: Number of token ids.

    Returns:
        `<u2` (uint16) for a vocabulary below 65500, else `<i4` (int32).

    Source: megatron/core/datasets/indexed_dataset.py@core_v0.19.2, DType.optimal_dtype.
    """
    return "<u2" if vocab_size < _FIRST_VOCAB_SIZE_OF_INT32 else "<i4"


def write_indexed_dataset(
    prefix: Path, documents: Iterable[Sequence[int]], *, vocab_size: int
) -> int:
    """Write PREFIX.bin and PREFIX.idx, one sequence for each document.

    Args:
        prefix: Path without the endings; its folder exists.
        documents: Token ids of each document, with the end-of-document token; read once, in order.
        vocab_size: Number of token ids; decides the stored type.

    Returns:
        The number of tokens written.

    Source: megatron/core/datasets/indexed_dataset.py@core_v0.19.2, _IndexWriter.
    """
    dtype = token_dtype(vocab_size)
    lengths: list[int] = []
    with open(f"{prefix}.bin", "wb") as bin_file:
        for document in documents:
            bin_file.write(np.asarray(document, dtype=dtype).tobytes())
            lengths.append(len(document))
    num_sequences = len(lengths)
    # Byte offset of each sequence in the .bin file: the sum of the lengths before it.
    offsets = np.zeros(num_sequences + 1, dtype="<i8")
    np.cumsum(lengths, out=offsets[1:])
    with open(f"{prefix}.idx", "wb") as idx_file:
        idx_file.write(_MAGIC)
        idx_file.write(struct.pack("<QB", _VERSION, _DTYPE_CODES[dtype]))
        idx_file.write(struct.pack("<QQ", num_sequences, num_sequences + 1))
        idx_file.write(np.asarray(lengths, dtype="<i4").tobytes())
        idx_file.write((offsets[:-1] * np.dtype(dtype).itemsize).tobytes())
        # Document boundaries, counted in sequences.
        idx_file.write(np.arange(num_sequences + 1, dtype="<i8").tobytes())
    return int(offsets[-1])

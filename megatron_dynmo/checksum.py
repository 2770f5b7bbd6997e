"""A position-sensitive 64-bit checksum of tensors, computed where they live.

It guards moves against damage, not against an adversary, and is cheap enough to stay on: one pass
over the bytes where they are, with one number read back per tensor. On a CPU that is XXH3, several
times as fast as what torch can express; on a GPU a weighted sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

_MULTIPLIER = 0x5851F42D4C957F2D  # odd, so that no position can cancel another's bits
_BLOCK = 2**22  # words that are weighted at a time: few kernels, little memory


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that depends on every bit, its position and the order of the tensors.

    Args:
        tensors: any dtypes, shapes and devices; only read.

    Returns:
        Signed 64-bit integer; equal for equal bytes on every rank with the same kind of device.
    """
    total = 0
    for tensor in tensors:
        total = _wrap(total * _MULTIPLIER + _one(tensor) + tensor.numel())
    return total


def _one(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return _on_host(flat) if flat.device.type == "cpu" else _on_device(flat)


def _on_host(flat: torch.Tensor) -> int:
    return _wrap(xxhash.xxh3_64_intdigest(flat.numpy().data))


def _on_device(flat: torch.Tensor) -> int:
    if flat.storage_offset() % 4:
        flat = flat.clone()  # a view as 32-bit words must start at a word
    whole = flat.numel() // 4 * 4
    total = _wrap(int(_weighted(flat[:whole].view(torch.int32))))
    for byte in flat[whole:].tolist():
        total = _wrap(total * _MULTIPLIER + byte)
    return total


def _weighted(words: torch.Tensor) -> torch.Tensor:
    """Sum of all words, each times twice its index plus one, modulo 2**64; on their device."""
    size = min(words.numel(), _BLOCK)
    weights = torch.arange(size, device=words.device) * 2 + 1
    room = torch.empty(size, dtype=torch.int64, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), size or 1):
        part = words[start : start + size]
        # Integer arithmetic wraps modulo 2**64, so the order of additions does not matter.
        wide = room[: part.numel()].copy_(part)
        total += wide.sum() * (2 * start)
        total += wide.mul_(weights[: part.numel()]).sum()
    return total


def _wrap(value: int) -> int:
    """Reduce to a signed 64-bit number."""
    return (value + 2**63) % 2**64 - 2**63

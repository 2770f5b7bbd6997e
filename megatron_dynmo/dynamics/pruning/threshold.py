"""Exact selection of the smallest magnitudes of all ranks, without bringing them to one rank.

Tier: torch. A magnitude is compared by its bit pattern, an integer, so no rounding takes part. The
k-th smallest is found digit by digit: each rank counts its candidates by the next bits, the counts
are added over the ranks, and the digit in which the k-th lies narrows the candidates. A digit costs
one all-reduce of a few kilobytes, whatever the model's size. Equal magnitudes are told apart by an
index that does not depend on who holds what, found in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

_DIGIT_BITS = 11
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Piece:
    """Numbers that one rank holds.

    Attributes:
        values: float `[n]`, read only; every piece of a selection has the same dtype.
        index: takes positions in `values` (int64 `[m]`, ascending) and gives the index of each in
            the whole model (int64 `[m]`, below 2**62): unique, and the same however the model is
            spread over ranks.
    """

    values: torch.Tensor
    index: Callable[[torch.Tensor], torch.Tensor]

    def part(self, positions: torch.Tensor) -> Piece:
        """Some of the numbers, at ascending int64 positions; a copy."""
        return Piece(self.values[positions], lambda within: self.index(positions[within]))


@dataclass(frozen=True)
class Bound:
    """The largest element that was selected; with it every piece can be cut alone.

    Attributes:
        bits: bit pattern of its magnitude; -1 when nothing was selected.
        index: its index; of elements with the same magnitude those up to it were selected.
    """

    bits: int
    index: int

    def selected(self, piece: Piece) -> torch.Tensor:
        """Tell which elements were selected.

        Returns:
            bool `[n]`, a new tensor.
        """
        bits = magnitude_bits(piece.values)
        found = bits < self.bits
        ties = (bits == self.bits).nonzero().flatten()
        if len(ties):
            found[ties] = piece.index(ties) <= self.index
        return found


def magnitude_bits(values: torch.Tensor) -> torch.Tensor:
    """Bit patterns of |values| as integers in the same order; NaN comes behind infinity.

    Args:
        values: float16, bfloat16, float32 or float64 of any shape.
    """
    integers = _INTEGERS[values.element_size()]
    return values.detach().contiguous().view(integers) & torch.iinfo(integers).max


def smallest(
    pieces: Sequence[Piece],
    count: int,
    *,
    num_indices: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Bound:
    """Find the `count` elements of smallest magnitude, ties by ascending index.

    Memory: a few int64 copies of the largest piece. Time: one pass over the values for each digit
    of 11 bits, three for float32; indices are asked for ties only.

    Args:
        pieces: what this rank holds; may be empty. Each element must be in one piece of one rank
            of the group, so replicas stay outside: give the group that holds each weight once.
        count: how many to select, at most the number of elements.
        num_indices: every index is below this.
        dtype: of the values of all ranks.
        device: where the group's collectives take their tensors.
        group: ranks that hold pieces; None for this rank alone.

    Returns:
        The same bound on every rank.

    Collective:
        All ranks of the group, with the same `count` and `num_indices`.
    """
    if count == 0:
        return Bound(-1, -1)
    width = dtype.itemsize * 8 - 1
    find = partial(_digits, device=device, group=group)
    bits, smaller = find(lambda: (magnitude_bits(p.values) for p in pieces), count, width)

    def ties() -> Iterator[torch.Tensor]:
        for piece in pieces:
            yield piece.index((magnitude_bits(piece.values) == bits).nonzero().flatten())

    index, _ = find(ties, count - smaller, max(num_indices.bit_length(), 1))
    return Bound(bits, index)


def _digits(
    keys: Callable[[], Iterable[torch.Tensor]],
    rank: int,
    width: int,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[int, int]:
    """Find the `rank`-th smallest key (1-based) of all ranks.

    Args:
        keys: gives this rank's keys anew at each call: non-negative integers below 2**width.
        rank: which one.
        width: bits of a key.
        device: where the group's collectives take their tensors.
        group: see `smallest`.

    Returns:
        The key, and how many keys are smaller.
    """
    found, smaller = 0, 0
    for shift in range((width - 1) // _DIGIT_BITS * _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = torch.zeros(1 << _DIGIT_BITS, dtype=torch.int64, device=device)
        for own in keys():
            # Narrow integers cannot be shifted by more than their width.
            head = own.to(torch.int64) >> shift
            digits = head[head >> _DIGIT_BITS == found] & ((1 << _DIGIT_BITS) - 1)
            counts += torch.bincount(digits, minlength=len(counts)).to(device)
        if group is not None:
            dist.all_reduce(counts, group=group)
        upto = counts.cumsum(0)
        digit = int(torch.searchsorted(upto, rank - smaller))
        assert digit < len(counts), f"{rank} were asked for, {smaller + int(upto[-1])} there are"
        smaller += int(upto[digit] - counts[digit])
        found = found << _DIGIT_BITS | digit
    return found, smaller

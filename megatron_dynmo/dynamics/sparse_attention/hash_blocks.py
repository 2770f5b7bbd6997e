"""Where attention within buckets has work: tokens sorted by bucket, cut into blocks.

Sorted by (code, position), the keys that a query may see (its own bucket, earlier positions) lie
side by side. A block is a run of sorted queries; the keys that it needs are one slice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Queries `rows` against keys `columns`, both in sorted order.

    Every query of the block sees all keys of `columns` before `masked_from`; from there on it
    depends on the query.
    """

    rows: slice
    columns: slice
    masked_from: int

    @property
    def area(self) -> int:
        """Scores that are computed."""
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)


@dataclass(frozen=True)
class HashOrder:
    """Tokens of every round and group in sorted order; int64, on the codes' device.

    Attributes:
        queries, keys: `[rounds, groups, T or S]`, which token stands at a sorted place.
        first, last: `[rounds, groups, T]`, for the query at a sorted place: the slice of sorted
            keys (last excluded) that share its bucket and come before it. A query's own position
            is never among them.
    """

    queries: Tensor
    keys: Tensor
    first: Tensor
    last: Tensor


def hash_order(query_codes: Tensor, key_codes: Tensor) -> HashOrder:
    """Sort tokens by code and position.

    Args:
        query_codes: `[rounds, groups, T]`, int64 codes >= 0. T is a multiple of S: the heads of a
            query group follow each other, each with S positions.
        key_codes: `[rounds, groups, S]`.
    """
    length = key_codes.shape[-1]
    position = torch.arange(length, device=key_codes.device)
    key_place, keys = (key_codes * length + position).sort(dim=-1)
    heads = query_codes.shape[-1] // length
    query_place, queries = (query_codes * length + position.repeat(heads)).sort(dim=-1, stable=True)
    bucket = query_place - query_place % length
    return HashOrder(
        queries,
        keys,
        first=torch.searchsorted(key_place, bucket),
        last=torch.searchsorted(key_place, query_place),
    )


def blocks_of(order: HashOrder, query_codes: Tensor, size: int) -> list[list[list[Block]]]:
    """List the blocks of every round and group; queries without an earlier key have none.

    Args:
        order: of these codes.
        query_codes: `[rounds, groups, T]`.
        size: most queries a block holds.
    """
    num_rounds, num_groups, _ = query_codes.shape
    sorted_codes = query_codes.gather(-1, order.queries)
    return [
        [
            _blocks(order.first[r, g], order.last[r, g], sorted_codes[r, g], size)
            for g in range(num_groups)
        ]
        for r in range(num_rounds)
    ]


def _blocks(first: Tensor, last: Tensor, codes: Tensor, size: int) -> list[Block]:
    buckets = torch.unique_consecutive(codes, return_counts=True)[1].tolist()
    cuts = torch.tensor(_cuts(buckets, size), device=codes.device)
    head, tail = cuts[:-1], cuts[1:] - 1
    # In a block of one bucket, what the first query sees, all see.
    one_bucket = first[head] == first[tail]
    masked_from = torch.where(one_bucket, last[head], first[head])
    bounds = (head, cuts[1:], first[head], last[tail], masked_from)
    return [
        Block(slice(start, stop), slice(low, high), masked)
        for start, stop, low, high, masked in zip(*(b.tolist() for b in bounds), strict=True)
        if high > low
    ]


def _cuts(buckets: Iterable[int], size: int) -> list[int]:
    """Cut sorted queries into blocks: a big bucket into even parts, small ones packed together."""
    cuts, place, filled = [0], 0, 0
    for count in buckets:
        if filled and filled + count > size:
            cuts.append(place)
            filled = 0
        if count > size:
            parts = -(-count // size)
            cuts += [place + count * part // parts for part in range(1, parts + 1)]
        else:
            filled += count
        place += count
    return cuts if cuts[-1] == place else [*cuts, place]

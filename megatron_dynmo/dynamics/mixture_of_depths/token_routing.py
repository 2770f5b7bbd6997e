"""Send some tokens of a sequence through a block and let the others pass by.

Tier: torch, not Megatron. The block sees a shorter sequence, so all of its work shrinks; the tokens
keep their order, so a causal mask by place and positions that are handed along stay right.

Source: Raposo et al., Mixture-of-Depths, arXiv 2404.02258, section 3 (expert-choice routing over
the sequence, the router's weight on the path of the gradient).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chosen:
    """The tokens of each sample that go through a block, in their order.

    Attributes:
        positions: int64 [k, b], place in the sequence, ascending along k in each sample. Behind
            the tokens of a sample that has fewer than k, places of tokens that were not chosen.
        is_token: bool [k, b], False behind the last token of a sample; None where all are tokens.
        seq_length: s.
    """

    positions: torch.Tensor
    is_token: torch.Tensor | None
    seq_length: int

    @property
    def num_slots(self) -> int:
        """Length of the sequence that the block sees."""
        return self.positions.shape[0]

    def mask(self) -> torch.Tensor:
        """Return bool [s, b]: whether a token goes through the block."""
        mask = self.positions.new_zeros(
            (self.seq_length, self.positions.shape[1]), dtype=torch.bool
        )
        value = torch.ones_like(self.positions, dtype=torch.bool)
        return mask.scatter_(0, self.positions, value if self.is_token is None else self.is_token)


def num_slots(seq_length: int, capacity: float, multiple_of: int = 1) -> int:
    """Return how many tokens a capacity lets through.

    Args:
        seq_length: Tokens of the sequence, a multiple of `multiple_of`.
        capacity: Share of them, above 0 and at most 1; rounded to the nearest token, at least one.
        multiple_of: The result is rounded up to a multiple of this.
    """
    assert 0 < capacity <= 1, capacity
    wanted = max(1, math.floor(capacity * seq_length + 0.5))
    return -(-wanted // multiple_of) * multiple_of


def choose_top(logits: torch.Tensor, slots: int) -> Chosen:
    """Choose the tokens with the highest logits of each sample (expert choice).

    Which token is chosen depends on all tokens of its sample, later ones too.

    Args:
        logits: [s, b], the same on every rank that shares the decision. Of equal ones the earlier
            wins.
        slots: Tokens to choose in each sample.
    """
    order = torch.sort(logits, dim=0, descending=True, stable=True).indices[:slots]
    return Chosen(torch.sort(order, dim=0).values, None, logits.shape[0])


def choose_above(logits: torch.Tensor, threshold: float = 0.0, multiple_of: int = 1) -> Chosen:
    """Choose every token whose logit is above a threshold.

    Whether a token is chosen depends on its own logit alone, so nothing looks ahead.

    Args:
        logits: [s, b], the same on every rank that shares the decision.
        threshold: What a logit must exceed.
        multiple_of: The number of slots, that of the fullest sample, is rounded up to a multiple of
            this; there is at least one slot, so that a block always runs.

    Returns:
        As many slots as the fullest sample needs. The host waits for the device to learn it.
    """
    is_chosen = logits > threshold
    fullest = max(1, int(is_chosen.sum(dim=0).max()))
    slots = -(-fullest // multiple_of) * multiple_of
    order = torch.sort(is_chosen.logical_not(), dim=0, stable=True).indices[:slots]
    return Chosen(order, is_chosen.gather(0, order), logits.shape[0])


class LocalTokens:
    """The chosen tokens among those that this rank holds.

    Args:
        chosen: Over the whole sequence.
        start: Place in the sequence of the first token held here.
        length: Tokens of each sample held here; the whole sequence by default.

    Attributes:
        num_tokens: How many there are, in all samples together.
    """

    def __init__(self, chosen: Chosen, start: int = 0, length: int | None = None) -> None:
        slots, batch = chosen.positions.shape
        length = chosen.seq_length if length is None else length
        rows = (chosen.positions - start) * batch + torch.arange(
            batch, device=chosen.positions.device
        )
        self._slots = (slots, batch)
        self._is_all = chosen.is_token is None and length == chosen.seq_length
        if self._is_all:
            self._rows, self._at = rows.flatten(), rows.flatten()[:0]
        else:
            is_here = (rows >= 0) & (rows < length * batch)
            if chosen.is_token is not None:
                is_here &= chosen.is_token
            self._at = is_here.flatten().nonzero().squeeze(1)
            self._rows = rows.flatten().index_select(0, self._at)
        self.num_tokens = self._rows.numel()

    def take(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the chosen tokens held here as rows.

        Args:
            hidden: [length, b, h].

        Returns:
            [n, h], differentiable.
        """
        return hidden.flatten(0, 1).index_select(0, self._rows)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Put rows into the slots of the shorter sequence; slots without a token here are zero.

        Args:
            rows: [n, h], as `take` returned them.

        Returns:
            [k, b, h], differentiable.
        """
        if not self._is_all:
            empty = rows.new_zeros((self._slots[0] * self._slots[1], rows.shape[1]))
            rows = empty.index_copy(0, self._at, rows)
        return rows.unflatten(0, self._slots)

    def collect(self, short: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens held here from the shorter sequence; undoes `spread`.

        Args:
            short: [k, b, h].

        Returns:
            [n, h], differentiable.
        """
        rows = short.flatten(0, 1)
        return rows if self._is_all else rows.index_select(0, self._at)

    def put(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden states with these rows in place of the chosen tokens.

        Args:
            hidden: [length, b, h]; not changed.
            rows: [n, h].

        Returns:
            New memory like `hidden`, differentiable; tokens that were not chosen keep every bit.
        """
        whole = hidden.flatten(0, 1).index_copy(0, self._rows, rows)
        return whole.view(hidden.shape)


def mixed(before: torch.Tensor, after: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Add what a block did to its tokens, by weight.

    Args:
        before: [n, h], what went into a block that has a residual connection.
        after: [n, h], what came out.
        weight: [n], on the path of the gradient; None leaves `after` as it is, bit for bit.
    """
    if weight is None:
        return after
    return torch.lerp(before, after, weight.to(after.dtype).unsqueeze(-1))


def pick_positions(table: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    """Return the entries of a table by position, as rotary embeddings are, of the chosen tokens.

    Args:
        table: [s, 1 or b, ...].
        chosen: Which tokens.

    Returns:
        [k, b, ...], new memory.
    """
    slots, batch = chosen.positions.shape
    if table.shape[1] == 1:
        return table[:, 0].index_select(0, chosen.positions.flatten()).unflatten(0, (slots, batch))
    sample = torch.arange(batch, device=table.device)
    return table[chosen.positions, sample]


def pick_pairs(mask: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    """Return the part of an attention mask that is about the chosen tokens.

    Args:
        mask: bool [1 or b, 1, s, s], True where a query (third axis) must not see a key; causal.
        chosen: Which tokens.

    Returns:
        bool [b, 1, k, k]. Slots without a token are seen by none that is one.
    """
    places = chosen.positions.t()  # [b, k]
    slots, batch = chosen.positions.shape
    sample = (
        torch.arange(batch, device=mask.device)
        if mask.shape[0] > 1
        else torch.zeros_like(places[:, 0])
    )
    picked = mask[sample[:, None, None], 0, places[:, :, None], places[:, None, :]]
    if chosen.is_token is not None:
        # Those slots lie behind all tokens, whatever the place of what fills them.
        picked = picked | torch.ones_like(picked).triu(1)
    return picked.view(batch, 1, slots, slots)

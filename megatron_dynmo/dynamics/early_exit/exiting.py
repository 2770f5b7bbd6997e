"""Tokens that leave a transformer early: who stays, how sure a token is, how the rest attends.

Tier: torch. What a layer of Megatron makes of it is in `remaining_layer.py`.

Source: Schuster et al., Confident Adaptive Language Modeling (arXiv 2207.07061), for leaving by the
softmax of a head or by the saturation of the hidden state, and for the keys and values of tokens
that have left: they are computed in every later layer from the hidden state with which they left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Remaining:
    """The tokens of a micro-batch that a layer still computes, in order of sample and position.

    With sequence parallelism a rank holds an equal part of the positions and Megatron's layers
    exchange equally long parts, so the shorter lists of tokens are padded to the longest one.
    n = remaining tokens of the micro-batch, m = rows that this rank computes, s_l = positions of
    the sequence that lie on this rank (all of them without sequence parallelism).

    Attributes:
        positions: int64 [n], position in the whole sequence.
        counts: remaining tokens of each sample.
        flat: int64 [n], row of each token in the whole sequence flattened to [s * b].
        rows: int64 [m], rows to compute in hidden states [s_l * b]; padding repeats row 0.
        num_mine: how many of `rows` are no padding; they come first.
        spread: int64 [ranks * m], index into the n tokens that puts them into the order and
            padding of `rows` of all ranks; None without sequence parallelism.
    """

    positions: torch.Tensor
    counts: tuple[int, ...]
    flat: torch.Tensor
    rows: torch.Tensor
    num_mine: int
    spread: torch.Tensor | None

    @classmethod
    def of(cls, exited: torch.Tensor, rank: int = 0, num_parts: int = 1) -> Remaining:
        """Sort out who remains; waits for the device once.

        Args:
            exited: bool [s, b], the whole sequence.
            rank: which part of the positions this rank holds.
            num_parts: equal parts that the positions are dealt out in.
        """
        length, batch = exited.shape
        samples, positions = torch.nonzero(~exited.t(), as_tuple=True)
        counts = tuple(torch.bincount(samples, minlength=batch).tolist())
        flat = positions * batch + samples
        if num_parts == 1:
            return cls(positions, counts, flat, flat, len(flat), None)
        part = length // num_parts
        owners = positions // part
        sizes = torch.bincount(owners, minlength=num_parts).tolist()
        by_owner = torch.argsort(owners, stable=True).split(sizes)
        spread = torch.stack([F.pad(own, (0, max(sizes) - len(own))) for own in by_owner])
        rows = flat[by_owner[rank]] - rank * part * batch
        rows = F.pad(rows, (0, max(sizes) - len(rows)))
        return cls(positions, counts, flat, rows, sizes[rank], spread.flatten())

    def __len__(self) -> int:
        """Remaining tokens of the micro-batch."""
        return len(self.positions)

    def select(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows to compute, [m, 1, ...], of a tensor [s_l, b, ...]."""
        return hidden.flatten(0, 1).index_select(0, self.rows).unsqueeze(1)

    def place(self, hidden: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Return hidden states [s_l, b, h] with the rows [m, 1, h] that were computed in place."""
        rows, computed = self.rows[: self.num_mine], computed[: self.num_mine, 0]
        return hidden.flatten(0, 1).index_copy(0, rows, computed).view_as(hidden)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    remaining: Remaining,
    *,
    scale: float,
    masked: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Let the remaining tokens attend to all tokens before them, those that have left too.

    Args:
        query: [n, heads, d] of the remaining tokens.
        key: [s, b, groups, d] of all tokens; heads of a group share a key.
        value: [s, b, groups, d_v].
        remaining: who they are.
        scale: of the scores.
        masked: bool [1 or b, 1, s, s], True where a query must not look; None for causal attention.
        dropout: probability, of attention weights.

    Returns:
        [n, heads * d_v].
    """
    heads_per_group = query.shape[1] // key.shape[2]
    columns = torch.arange(key.shape[0], device=query.device)
    found = []
    parts = zip(
        query.split(remaining.counts), remaining.positions.split(remaining.counts), strict=True
    )
    for sample, (queries, positions) in enumerate(parts):
        if masked is None:
            allowed = columns <= positions[:, None]
        else:
            allowed = ~masked[min(sample, len(masked) - 1), 0].index_select(0, positions)
        keys, values = (
            part[:, sample].transpose(0, 1).repeat_interleave(heads_per_group, dim=0)
            for part in (key, value)
        )
        context = F.scaled_dot_product_attention(
            *(queries.transpose(0, 1)[None], keys[None], values[None]),
            attn_mask=allowed,
            dropout_p=dropout,
            scale=scale,
        )
        found.append(context[0].transpose(0, 1).flatten(1))
    return torch.cat(found)


def confidence(logits: torch.Tensor, measure: str) -> torch.Tensor:
    """How sure a head is of the next token.

    Args:
        logits: [n, classes].
        measure: `probability`, of the likeliest class; `gap` between the two likeliest ones.

    Returns:
        float32 [n], from 0 to 1.
    """
    first, second = torch.softmax(logits.detach().float(), dim=-1).topk(2, dim=-1).values.unbind(-1)
    return first if measure == "probability" else first - second


def saturation(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """How little a layer turned its tokens: cosine of its input and output, at least 0.

    Args:
        before: [n, h].
        after: [n, h].

    Returns:
        float32 [n], from 0 to 1.
    """
    cosine = F.cosine_similarity(before.detach().float(), after.detach().float(), dim=-1)
    return cosine.clamp(0.0, 1.0)


class _Attached(torch.autograd.Function):
    """Hidden states that carry a loss: it is differentiated when they are."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(loss, scale)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        loss, scale = ctx.saved_tensors
        return gradients[0], scale.to(loss.dtype).expand_as(loss), None


def attach_loss(hidden: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Add a loss to the gradient, without adding it to the loss that is reported.

    Args:
        hidden: hidden states on the way to the reported loss.
        loss: a scalar.
        scale: a scalar, what the backward pass of the reported loss starts with.
    """
    return _Attached.apply(hidden, loss, scale)


class _Kept(torch.autograd.Function):
    """Hidden states whose backward pass gives parameters a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def keep_in_graph(hidden: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give parameters that were not used a gradient of zero.

    A bucket of gradients is reduced when every parameter in it has reported its own, so one that no
    token of a micro-batch reached would keep it waiting.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    return _Kept.apply(hidden, *wanted)

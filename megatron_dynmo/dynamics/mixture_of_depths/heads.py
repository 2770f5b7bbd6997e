"""What decides which tokens a block gets: a router, and a predictor of its choice.

Tier: torch, not Megatron. Both see hidden states scaled to unit root mean square, so that their
logits depend on the direction of a token only and stay bounded however the residual stream grows.

Source: Raposo et al., Mixture-of-Depths, arXiv 2404.02258, sections 3.4 and 3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_EPS = 1e-6
_INIT_STD = 0.02
# Share of the hidden size that the predictor's inner layer has; costs 1/200 of a dense layer.
_PREDICTOR_SHARE = 16
_PREDICTOR_MIN_WIDTH = 8


class TokenRouter(torch.nn.Module):
    """A linear router: one logit a token, and the weight of what a block adds to the token.

    Args:
        hidden_size: h.
        generator: Where the initial weights are drawn from.
        learns: Whether the weights are trained; if not they are a buffer.

    Attributes:
        weight: [1, h].
    """

    weight: torch.Tensor

    def __init__(
        self, hidden_size: int, generator: torch.Generator, *, learns: bool = True
    ) -> None:
        super().__init__()
        weight = _parameter(1, hidden_size, std=_INIT_STD, generator=generator)
        if learns:
            self.weight = weight
        else:
            self.register_buffer("weight", weight.detach())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [...], fp32 or wider, of hidden states [..., h]."""
        hidden = _wide(hidden)
        scale = hidden.square().mean(dim=-1).add(_EPS).rsqrt()
        return F.linear(hidden, self.weight.to(hidden.dtype)).squeeze(-1) * scale

    def weigh(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the weight in (0, 1) of tokens [n, h], on the path of the gradient."""
        return torch.sigmoid(self(tokens))


class ChoicePredictor(torch.nn.Module):
    """Foretells from a token alone whether the router, which compares all tokens, will choose it.

    Its input carries no gradient, so it changes nothing but itself.

    Args:
        hidden_size: h.
        generator: Where the initial weights are drawn from.
    """

    def __init__(self, hidden_size: int, generator: torch.Generator) -> None:
        super().__init__()
        width = max(_PREDICTOR_MIN_WIDTH, hidden_size // _PREDICTOR_SHARE)
        self.inner = _parameter(width, hidden_size, std=hidden_size**-0.5, generator=generator)
        self.outer = _parameter(1, width, std=width**-0.5, generator=generator)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [...], fp32 or wider, of hidden states [..., h]; above 0 means chosen."""
        hidden = _wide(hidden.detach())
        hidden = F.rms_norm(hidden, hidden.shape[-1:], eps=_EPS)
        inner = F.silu(F.linear(hidden, self.inner.to(hidden.dtype)))
        outer = F.linear(inner, self.outer.to(hidden.dtype), self.bias.to(hidden.dtype))
        return outer.squeeze(-1)


def prediction_loss(logits: torch.Tensor, is_chosen: torch.Tensor) -> torch.Tensor:
    """Return the binary cross entropy of a prediction, summed over tokens.

    Args:
        logits: [...] of the predictor.
        is_chosen: bool [...], what the router chose.
    """
    return F.binary_cross_entropy_with_logits(logits, is_chosen.to(logits.dtype), reduction="sum")


class _WithLoss(torch.autograd.Function):
    """The identity, whose backward pass also starts that of a second loss."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        loss: torch.Tensor,
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.scale = scale
        ctx.one = torch.ones_like(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, ctx.scale(ctx.one), None


def with_loss(
    output: torch.Tensor, loss: torch.Tensor, scale: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Let a loss of its own be part of the gradient without being part of the loss reported.

    Args:
        output: What the model goes on with; its value and gradient stay as they are.
        loss: Without shape.
        scale: Called in the backward pass: makes of a one the gradient of the loss, with what the
            main loss is scaled with there.
    """
    result: torch.Tensor = _WithLoss.apply(output, loss, scale)
    return result


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the CPU, so that weights drawn from it are the same on all devices."""
    return torch.Generator().manual_seed(seed)


def agreement(logits: torch.Tensor, is_chosen: torch.Tensor) -> torch.Tensor:
    """Return how many predictions were right, as a tensor without shape.

    Args:
        logits: [...] of the predictor.
        is_chosen: bool [...], what the router chose.
    """
    return ((logits > 0) == is_chosen).sum()


def _parameter(
    rows: int, columns: int, *, std: float, generator: torch.Generator
) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(rows, columns).normal_(0.0, std, generator=generator))


def _wide(hidden: torch.Tensor) -> torch.Tensor:
    """At least fp32: half precision would make ties among logits."""
    return hidden.float() if hidden.dtype in (torch.float16, torch.bfloat16) else hidden

"""Skewed loads of experts that are known beforehand, for tests and benchmarks.

Tier: torch, not Megatron. A bias on a router's logits draws the experts of each token from a
distribution that layer and iteration decide. It depends on nothing else but the token's place in
its sequence, so it is the same for every layout, micro-batch, replica and device.

With Gumbel noise beside the logarithm of the weights, the expert with the highest logit is a draw
from the distribution, and the highest k are a draw without putting back.

Source: Kool et al., Stochastic Beams and Where to Find Them, arXiv 1903.06059, section 2.3.
"""

from __future__ import annotations

import math

import torch

from megatron_dynmo.flags.moe import SkewSpec

# Multipliers that keep the seeds of layers and iterations apart.
_LAYER_STRIDE, _ITERATION_STRIDE = 1_000_003, 7_919
_LEAST = 1e-20


def expert_weights(
    spec: SkewSpec, num_experts: int, layer_number: int, num_layers: int, iteration: int
) -> torch.Tensor:
    """Return how often each expert is wanted first.

    Args:
        spec: the workload.
        num_experts: experts of the layer.
        layer_number: 1-based.
        num_layers: of the model.
        iteration: 1-based.

    Returns:
        float64 [num_experts] on the CPU; adds up to 1.
    """
    weights = torch.full((num_experts,), 1.0 / num_experts, dtype=torch.float64)
    if spec.kind == "zipf":
        weights = _zipf(spec.exponent, num_experts, layer_number)
    elif spec.kind == "drift":
        hot = min(spec.hot, num_experts)
        first = int((iteration - 1) // spec.period) + layer_number - 1
        weights = weights * (1 - spec.share)
        for offset in range(hot):
            weights[(first + offset) % num_experts] += spec.share / hot
    elif spec.kind == "phases":
        # A wave of skew that runs through the layers.
        turn = (iteration - 1) / spec.period + (layer_number - 1) / num_layers
        level = 0.5 - 0.5 * math.cos(2 * math.pi * turn)
        weights = _zipf(spec.exponent * level, num_experts, layer_number)
    return weights / weights.sum()


def logit_bias(weights: torch.Tensor, num_places: int, seed: int) -> torch.Tensor:
    """Return what to add to logits so that experts are drawn by weight.

    Args:
        weights: [num_experts], as `expert_weights` returns them.
        num_places: tokens of a sequence.
        seed: of the noise; see `noise_seed`.

    Returns:
        float32 [num_places, num_experts] on the CPU, owned by the caller.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(num_places, weights.numel(), generator=generator, dtype=torch.float64)
    gumbel = -torch.log(-torch.log(noise.clamp(_LEAST, 1 - 1e-12)))
    return (torch.log(weights.clamp(min=_LEAST)) + gumbel).float()


def noise_seed(seed: int, layer_number: int, iteration: int) -> int:
    """Return the seed of the noise of a layer in an iteration.

    Args:
        seed: Megatron's `--seed`.
        layer_number: 1-based.
        iteration: 1-based.
    """
    return seed + _LAYER_STRIDE * layer_number + _ITERATION_STRIDE * iteration


def _zipf(exponent: float, num_experts: int, layer_number: int) -> torch.Tensor:
    """Weights by Zipf's law, the most wanted expert another one in every layer."""
    ranks = torch.arange(1, num_experts + 1, dtype=torch.float64)
    return ranks.pow(-exponent).roll(layer_number - 1)

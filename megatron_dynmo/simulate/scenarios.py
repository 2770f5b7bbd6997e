"""The six dynamics as equations: what each leaves of a layer's time and memory, and when.

Every number a scenario uses is a field with its meaning and unit. Moments are shares of the run
(0.3 is the end of the first 30 % of the iterations); depth runs from 0 (first layer) to 1 (last).
The equations are models of ours of published methods, not measurements; to simulate a run of your
own, use what it recorded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.drift import changes, drift, ramp, steps_done
from megatron_dynmo.simulate.model import TransformerModel
from megatron_dynmo.simulate.trace import CostTrace

__all__ = [
    "EarlyExit",
    "ExpertRouting",
    "GradualPruning",
    "LayerFreezing",
    "MixtureOfDepths",
    "Scenario",
    "SparseAttention",
]

type Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scenario(ABC):
    """One dynamic. `seq_length` is what its models usually train at."""

    name: ClassVar[str]
    seq_length: ClassVar[int] = 2048

    @abstractmethod
    def trace(self, model: TransformerModel, num_iterations: int, seed: int = 0) -> CostTrace:
        """Costs of every layer over a run.

        Args:
            model: the dense model.
            num_iterations: iterations of the run.
            seed: of everything random in the scenario.
        """


@dataclass(frozen=True)
class GradualPruning(Scenario):
    """Global magnitude pruning by a cubic schedule; sparse kernels for what is left.

    Sparsity after step k of n is s_f + (s_i - s_f)(1 - k/n)^3: the last step reaches s_f exactly.
    One threshold holds for all layers. Magnitudes in layer l are exponentially distributed with
    scale c_l, so the layer's sparsity is 1 - exp(-threshold / c_l), and the threshold is the one
    at which their mean is the schedule's. The linear parts of a layer then take
    min(1, overhead x nnz share) of their time; the core of attention is not pruned.

    Source: schedule: Zhu and Gupta, arXiv 1710.01878.

    Attributes:
        initial_sparsity: before the first step.
        final_sparsity: after the last.
        begin: share of the run at which the schedule begins (step 0).
        end: share at which its last step is taken.
        num_steps: steps after step 0.
        depth_trend: magnitudes go from e^trend at the first layer to e^-trend at the last.
        scale_spread: standard deviation of log c_l around the trend.
        sparse_overhead: time of a non-zero in a sparse kernel over that of a weight in a dense one.
        sparse_bytes: bytes of a non-zero with its index over those of a dense weight.
    """

    name: ClassVar[str] = "pruning"
    initial_sparsity: float = 0.0
    final_sparsity: float = 0.9
    begin: float = 0.3
    end: float = 0.7
    num_steps: int = 4
    depth_trend: float = 0.5
    scale_spread: float = 0.1
    sparse_overhead: float = 2.5
    sparse_bytes: float = 1.2

    def sparsity_after(self, step: int) -> float:
        """Global sparsity after a step, 0 to num_steps."""
        left = 1.0 - step / self.num_steps
        return self.final_sparsity + (self.initial_sparsity - self.final_sparsity) * left**3

    def layer_sparsity(self, sparsity: float, scale: Array) -> Array:
        """Sparsity of every layer when all share one threshold; their mean is `sparsity`.

        Args:
            sparsity: global, 0 to 1.
            scale: [layers], mean magnitude of each layer's weights.
        """
        if sparsity in (0.0, 1.0):
            return np.full_like(scale, sparsity)
        low, high = 0.0, -math.log1p(-sparsity) * float(scale.max())
        for _ in range(200):
            middle = (low + high) / 2
            if float(np.mean(-np.expm1(-middle / scale))) < sparsity:
                low = middle
            else:
                high = middle
        layers: Array = -np.expm1(-high / scale)
        return layers

    def trace(self, model: TransformerModel, num_iterations: int, seed: int = 0) -> CostTrace:
        """See `Scenario.trace`."""
        rng = np.random.default_rng(seed)
        depth = np.linspace(1.0, -1.0, model.num_layers)
        noise = self.scale_spread * rng.standard_normal(model.num_layers)
        scale = np.exp(self.depth_trend * depth + noise)
        table = [
            1.0 - self.layer_sparsity(self.sparsity_after(k), scale)
            for k in range(self.num_steps + 1)
        ]
        before = 1.0 - self.layer_sparsity(self.initial_sparsity, scale)
        done = steps_done(num_iterations, self.begin, self.end, self.num_steps)
        # Row 0 of the table is before the schedule, row k + 1 after step k.
        kept = np.stack([before, *table])[done]
        linear = 1.0 - model.core_share
        time = model.core_share + linear * np.minimum(1.0, self.sparse_overhead * kept)
        memory = np.minimum(1.0, self.sparse_bytes * kept)
        return model.trace(time, memory_factor=memory, announced=changes(done))


@dataclass(frozen=True)
class LayerFreezing(Scenario):
    """Layers freeze from the front; a frozen front needs no backward at all.

    After step k of n the first round(final_fraction x layers x k/n) layers are frozen. All layers
    before a frozen one are frozen too, so neither its weight gradient nor its input gradient is
    computed: its backward time is 0, and it keeps parameters only.

    Attributes:
        final_fraction: share of the layers frozen after the last step.
        begin: share of the run at which the schedule begins; nothing is frozen yet.
        end: share at which the last step is taken.
        num_steps: steps.
        frozen_bytes: share of a layer's bytes that a frozen one keeps (2 of 18: the parameters).
    """

    name: ClassVar[str] = "freezing"
    final_fraction: float = 0.75
    begin: float = 0.1
    end: float = 0.8
    num_steps: int = 8
    frozen_bytes: float = 2 / 18

    def frozen_after(self, step: int, num_layers: int) -> int:
        """Frozen layers after a step, 0 to num_steps."""
        return round(self.final_fraction * num_layers * step / self.num_steps)

    def trace(self, model: TransformerModel, num_iterations: int, seed: int = 0) -> CostTrace:
        """See `Scenario.trace`; nothing here is random."""
        done = steps_done(num_iterations, self.begin, self.end, self.num_steps)
        front = np.array(
            [0] + [self.frozen_after(k, model.num_layers) for k in range(self.num_steps + 1)]
        )[done]
        frozen = np.arange(model.num_layers) < front[:, None]
        return model.trace(
            np.ones(frozen.shape),
            np.where(frozen, 0.0, 1.0),
            np.where(frozen, self.frozen_bytes, 1.0),
            announced=changes(done),
        )


@dataclass(frozen=True)
class SparseAttention(Scenario):
    """Hash-based attention: a token attends to the tokens of its own bucket.

    Work in the core of attention is the probability that two tokens share a bucket, the sum of
    p_b^2. With log-normal bucket sizes of spread k over B buckets that is e^(k^2) / B (at most 1).
    The spread differs by depth and drifts as the hashed vectors change.

    Source: the idea: Pagliardini et al., arXiv 2306.01160.

    Attributes:
        num_buckets: B.
        first_spread: spread k of the first layer.
        last_spread: of the last; linear in between.
        drift: standard deviation of the spread around that, over time and layers.
        correlation: iterations after which the drift has decayed to 1/e.
        overhead: time of a computed score over that of one in dense attention (sorting, chunks).
    """

    name: ClassVar[str] = "sparse-attention"
    seq_length: ClassVar[int] = 16_384
    num_buckets: int = 16
    first_spread: float = 1.5
    last_spread: float = 0.3
    drift: float = 0.15
    correlation: float = 200.0
    overhead: float = 1.3

    def density(self, spread: Array) -> Array:
        """Share of the scores that are computed, for any shape of spreads."""
        result: Array = np.minimum(1.0, np.exp(np.square(spread)) / self.num_buckets)
        return result

    def trace(self, model: TransformerModel, num_iterations: int, seed: int = 0) -> CostTrace:
        """See `Scenario.trace`."""
        base = np.linspace(self.first_spread, self.last_spread, model.num_layers)
        wander = drift(num_iterations, model.num_layers, self.correlation, seed)
        spread = np.maximum(0.0, base + self.drift * wander)
        core = np.minimum(1.0, self.overhead * self.density(spread))
        return model.trace(1.0 - model.core_share + model.core_share * core)


@dataclass(frozen=True)
class EarlyExit(Scenario):
    """Confident tokens leave; deeper layers compute the ones that remain.

    The share of tokens that enters a layer at depth x is 1 up to the first exit x0 and
    final_survival^(r (x - x0) / (1 - x0)) behind it, where r grows from 0 to 1 as the exits learn.
    A token that left still has its keys and values filled in, so that later tokens can attend.
    Losses of all tokens are computed at the output layer, as without exits.

    Source: the idea: Schuster et al., CALM, arXiv 2207.07061.

    Attributes:
        first_exit: depth before which nothing leaves.
        final_survival: share of the tokens that reaches the last layer in the end.
        begin: share of the run at which r begins to grow.
        end: share at which r is 1.
        noise: standard deviation of log r between iterations (batches differ).
    """

    name: ClassVar[str] = "early-exit"
    first_exit: float = 0.2
    final_survival: float = 0.05
    begin: float = 0.05
    end: float = 0.5
    noise: float = 0.03

    def survival(self, depth: Array, ramp: Array) -> Array:
        """Share of tokens that enters a layer.

        Args:
            depth: of the layer, 0 to 1.
            ramp: r; broadcast against depth.
        """
        behind = np.maximum(0.0, depth - self.first_exit) / max(1.0 - self.first_exit, 1e-12)
        result: Array = self.final_survival ** (ramp * behind)
        return result

    def trace(self, model: TransformerModel, num_iterations: int, seed: int = 0) -> CostTrace:
        """See `Scenario.trace`."""
        rng = np.random.default_rng(seed)
        rate = ramp(num_iterations, self.begin, self.end)
        rate = rate * np.exp(self.noise * rng.standard_normal(num_iterations))
        depth = np.linspace(0.0, 1.0, model.num_layers)
        alive = self.survival(depth, rate[:, None])
        return model.trace(alive + (1.0 - alive) * model.key_value_share)


@dataclass(frozen=True)
class MixtureOfDepths(Scenario):
    """A router sends only some tokens through a block; the others pass by.

    A chosen block takes router_share + c of its time, c being min(1, capacity x e^(drift z)), where
    z wanders over time because thresholds, unlike top-k, do not fix the number of tokens. While
    the router warms up, the capacity falls from 1 along a straight line.

    Source: the idea and the defaults: Raposo et al., arXiv 2404.02258.

    Attributes:
        capacity: share of the tokens that a chosen block computes.
        every: every n-th block is chosen, the first one at index n - 1.
        router_share: time of the router over that of a dense block.
        drift: standard deviation of the log of the routed share; 0 for top-k routing.
        correlation: iterations after which the drift has decayed to 1/e.
        warm_up: share of the run at the end of which the capacity is reached.
    """

    name: ClassVar[str] = "mixture-of-depths"
    capacity: float = 0.125
    every: int = 2
    router_share: float = 0.005
    drift: float = 0.5
    correlation: float = 100.0
    warm_up: float = 0.1

    def trace(self, model: TransformerModel, num_iterations: int, seed: int = 0) -> CostTrace:
        """See `Scenario.trace`."""
        down = ramp(num_iterations, 0.0, self.warm_up)[:, None]
        wander = drift(num_iterations, model.num_layers, self.correlation, seed)
        capacity = 1.0 + (self.capacity - 1.0) * down
        routed = np.minimum(1.0, capacity * np.exp(self.drift * wander))
        chosen = np.arange(model.num_layers) % self.every == self.every - 1
        return model.trace(np.where(chosen, self.router_share + routed, 1.0))


@dataclass(frozen=True)
class ExpertRouting(Scenario):
    """Mixture of Experts: the busiest expert-parallel rank sets the time of a layer's experts.

    Expert e of a layer draws a share p_e of the tokens, the softmax of skew x z_e, where z wanders:
    hot experts cool down and others heat up. Experts lie in equal blocks on R expert-parallel
    ranks; the experts' time is that of a balanced MLP times R x the largest block's share.

    Attributes:
        num_experts: experts of a layer, a multiple of expert_parallel.
        expert_parallel: R.
        skew: of the layers on average; 0 is perfectly balanced routing.
        layer_skew: standard deviation of log skew between layers.
        correlation: iterations after which a hot expert's lead has decayed to 1/e.
        update_every: iterations for which routing stays as it is.
        every: every n-th layer has experts, the first one at index n - 1.
    """

    name: ClassVar[str] = "moe"
    num_experts: int = 32
    expert_parallel: int = 8
    skew: float = 1.0
    layer_skew: float = 0.5
    correlation: float = 150.0
    update_every: int = 5
    every: int = 1

    def busiest(self, scores: Array) -> Array:
        """Load of the busiest rank over the mean: [...] for scores of shape [..., num_experts]."""
        exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
        share = exp / exp.sum(axis=-1, keepdims=True)
        ranks = share.reshape(*scores.shape[:-1], self.expert_parallel, -1).sum(axis=-1)
        result: Array = self.expert_parallel * ranks.max(axis=-1)
        return result

    def trace(self, model: TransformerModel, num_iterations: int, seed: int = 0) -> CostTrace:
        """See `Scenario.trace`.

        Raises:
            ConfigError: the experts do not divide over the ranks.
        """
        if self.num_experts % self.expert_parallel:
            raise ConfigError(
                f"{self.num_experts} experts do not divide over {self.expert_parallel} ranks; set "
                f"num_experts to a multiple of expert_parallel"
            )
        rng = np.random.default_rng(seed)
        skews = self.skew * np.exp(self.layer_skew * rng.standard_normal(model.num_layers))
        keep = math.exp(-self.update_every / self.correlation)
        shape = (model.num_layers, self.num_experts)
        scores, rows = rng.standard_normal(shape), []
        for _ in range(math.ceil(num_iterations / self.update_every)):
            rows.append(self.busiest(skews[:, None] * scores))
            scores = keep * scores + math.sqrt(1 - keep**2) * rng.standard_normal(shape)
        busiest = np.repeat(np.stack(rows), self.update_every, axis=0)[:num_iterations]
        has_experts = np.arange(model.num_layers) % self.every == self.every - 1
        factor = 1.0 + model.mlp_share * (np.where(has_experts, busiest, 1.0) - 1.0)
        return model.trace(factor)

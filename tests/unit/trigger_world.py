"""A simulated run for the trigger: true costs and noise in, layouts and times out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_dynmo.balancers.partition import partition
from megatron_dynmo.cost import LayerCost, ModelCosts, predict_layout_ms
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger import Decision, Trigger, TriggerSettings
from megatron_dynmo.trigger.history import iteration_estimate_ms, owners

MICROBATCHES = 8
LAYER_BYTES = 10**8


L = 24
EVEN = LayerLayout.even(L, 4)
UNEVEN = EVEN.with_boundaries([0, 12, 16, 20, 24])


def flat(iteration: int) -> np.ndarray:
    return np.full(L, 3.0)


def heavy(layers: slice, factor: float) -> np.ndarray:
    load = np.full(L, 3.0)
    load[layers] *= factor
    return load


def gaussian(sd: float, layers: int = L):
    return lambda rng: rng.normal(1.0, sd, layers).clip(0.1)


def balance(costs: ModelCosts, layout: LayerLayout, speeds: tuple[float, ...]) -> LayerLayout:
    """The balancer of these tests: exact min-max, fewest layers moved among equals."""
    return layout.with_boundaries(
        partition(
            [layer.total_ms for layer in costs.layers],
            layout.num_stages,
            first_stage_extra=costs.first_stage_extra.total_ms,
            last_stage_extra=costs.last_stage_extra.total_ms,
            stage_speeds=None if set(speeds) == {1.0} else speeds,
            current=layout.boundaries,
        )
    )


def share_out(costs: ModelCosts, layout: LayerLayout, speeds: tuple[float, ...]) -> LayerLayout:
    """A quick balancer: cut where the running sum comes nearest to each equal share."""
    ends = np.cumsum([0.0, *(layer.total_ms for layer in costs.layers)])
    shares = ends[-1] * np.arange(1, layout.num_stages) / layout.num_stages
    cuts = np.abs(ends[None, :] - shares[:, None]).argmin(axis=1).tolist()
    return layout.with_boundaries([0, *cuts, layout.num_layers])


class World:
    """A pipeline whose layers cost what a function says, and a trigger that runs it.

    Args:
        load: iteration -> [num_layers] base ms of forward and backward of one micro-batch.
        layout: at the start.
        iterations: length of the run.
        slowness: iteration -> [num_stages]; healthy if None.
        noise: generator -> [num_layers] factors of one iteration; none if None.
        cost_ms: iteration, layers moved -> wall time of a move.
        truth_factor: layout -> factor on the iteration time that no layer's cost shows.
        settings: of the trigger.
        seed: of the noise.
        choose: the balancer.
        exact: take times from the schedule, pass by pass, instead of the quick estimate.
    """

    def __init__(
        self,
        load: Callable[[int], np.ndarray],
        layout: LayerLayout,
        iterations: int,
        *,
        slowness: Callable[[int], np.ndarray] | None = None,
        noise: Callable[[np.random.Generator], np.ndarray] | None = None,
        cost_ms: Callable[[int], float] = lambda layers: 20.0 + 10.0 * layers,
        truth_factor: Callable[[LayerLayout], float] = lambda layout: 1.0,
        settings: TriggerSettings | None = None,
        seed: int = 0,
        choose: Callable[..., LayerLayout] = balance,
        exact: bool = False,
    ) -> None:
        self.exact = exact
        self.load, self.slowness, self.noise = load, slowness, noise
        self.first = self.layout = layout
        self.iterations, self.iteration = iterations, 0
        self.cost_ms, self.truth_factor = cost_ms, truth_factor
        self.rng = np.random.default_rng(seed)
        self.trigger = Trigger(settings or TriggerSettings(), choose=choose)
        self.trigger.start(layout, 0, iterations)
        self.decisions: list[tuple[int, Decision]] = []
        self.total_ms = self.static_ms = self.moving_ms = 0.0
        self.times_ms: list[float] = []

    # ------------------------------------------------------------ what is true

    def layer_ms(self, layout: LayerLayout, iteration: int, factors: np.ndarray) -> np.ndarray:
        base = self.load(iteration) * factors
        if self.slowness is not None:
            base = base * self.slowness(iteration)[owners(layout)]
        return base

    def true_ms(self, layout: LayerLayout, layer_ms: np.ndarray) -> float:
        if self.exact:
            return predict_layout_ms(model_costs(layer_ms), layout) * self.truth_factor(layout)
        totals = np.concatenate([layer_ms, [0.0, 0.0]])[None]
        return float(iteration_estimate_ms(totals, layout, MICROBATCHES)[0]) * self.truth_factor(
            layout
        )

    def mean_ms(self, layout: LayerLayout) -> float:
        """Average iteration without noise had the run had this layout throughout."""
        ones, some = np.ones(layout.num_layers), range(5, self.iterations, 10)
        times = [self.true_ms(layout, self.layer_ms(layout, i, ones)) for i in some]
        return float(np.mean(times))

    # ------------------------------------------------------------ running

    def step(self) -> None:
        self.iteration += 1
        i, n = self.iteration, self.layout.num_layers
        factors = np.ones(n) if self.noise is None else self.noise(self.rng)
        layer_ms = self.layer_ms(self.layout, i, factors)
        iteration_ms = self.true_ms(self.layout, layer_ms)
        self.total_ms += iteration_ms
        self.times_ms.append(iteration_ms)
        static_ms = iteration_ms
        if self.layout != self.first:
            static_ms = self.true_ms(self.first, self.layer_ms(self.first, i, factors))
        self.static_ms += static_ms
        self.trigger.observe(i, model_costs(layer_ms), iteration_ms)
        if self.trigger.is_due(i):
            decision = self.trigger.decide(i, self.iterations - i)
            self.decisions.append((i, decision))
            if decision.is_move:
                self.apply(decision)

    def apply(self, decision: Decision) -> None:
        moved = int((owners(decision.new) != owners(self.layout)).sum())
        cost_ms = self.cost_ms(moved)
        self.total_ms += cost_ms
        self.moving_ms += cost_ms
        self.layout = decision.new
        self.trigger.moved(self.iteration, decision.new, cost_ms, moved * LAYER_BYTES)

    def run(self, until: int | None = None) -> World:
        while self.iteration < (self.iterations if until is None else until):
            self.step()
        return self

    @property
    def moves(self) -> list[tuple[int, Decision]]:
        return [(i, d) for i, d in self.decisions if d.is_move]


def model_costs(layer_ms: np.ndarray, microbatches: int = MICROBATCHES) -> ModelCosts:
    """A third of the time forward, two thirds backward."""
    return ModelCosts(
        layers=tuple(
            LayerCost(n, ms / 3, 2 * ms / 3, memory_bytes=LAYER_BYTES)
            for n, ms in enumerate(layer_ms.tolist(), 1)
        ),
        num_microbatches=microbatches,
    )


def world_ms(layout: LayerLayout) -> float:
    return predict_layout_ms(model_costs(flat(0)), layout)

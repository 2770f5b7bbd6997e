"""The trigger's settings, its determinism and state, and what it learns."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from megatron_dynmo.balancers.objective import min_max_layout
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.cost import LayerCost, ModelCosts
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger import CostHint, Trigger, TriggerSettings
from megatron_dynmo.trigger.learning import FailedMoves, MoveCost, PlanLives
from tests.unit.trigger_world import (
    EVEN,
    LAYER_BYTES,
    UNEVEN,
    L,
    World,
    balance,
    flat,
    gaussian,
    heavy,
    model_costs,
    world_ms,
)

# -------------------------------------------------------------------- settings


def test_gain_below_the_least_never_moves_and_says_so():
    layout = LayerLayout.from_boundaries([0, 50, 99], num_stages=2)
    load = np.full(99, 1.0)
    load[:50] *= 1.03
    world = World(lambda i: load, layout, 30, cost_ms=lambda n: 0.0).run()
    assert world.moves == []
    gain = world.decisions[0][1].gain_pct
    assert 0 < gain < 2
    best = balance(model_costs(load), layout, (1.0, 1.0))
    assert world.decisions[0][1].reason == f"best layout {best} gains {gain:.1f} % (< 2 %)"
    settings = TriggerSettings(min_gain_pct=0.5)
    eager = World(lambda i: load, layout, 400, cost_ms=lambda n: 0.0, settings=settings).run()
    assert len(eager.moves) == 1


def test_cooldown_is_kept():
    def load(i: int) -> np.ndarray:
        return heavy(slice(0, 8), 2.0 if i > 5 else 1.0)

    settings = TriggerSettings(cooldown=50)
    world = World(load, UNEVEN, 200, settings=settings).run()
    assert world.moves[0][0] == 3
    assert world.moves[1][0] == 54
    assert "cooldown until iteration 53" in world.decisions[2][1].reason


def test_interval_decides_only_then():
    settings = TriggerSettings(interval=10)
    world = World(flat, UNEVEN, 40, settings=settings).run()
    assert [i for i, _ in world.moves] == [10]
    assert world.decisions[0][1].reason == "next decision at 10"


def test_settings_come_from_the_config():
    config = DynMoConfig(window=5, cooldown=7, min_gain_pct=1.0, interval=9, memory_cap_gb=2.0)
    assert TriggerSettings.from_config(config) == TriggerSettings(5, 7, 1.0, 9, 2e9)
    assert TriggerSettings.from_config(DynMoConfig()) == TriggerSettings()


@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_other_windows(window):
    world = World(
        flat, UNEVEN, 200, noise=gaussian(0.01), settings=TriggerSettings(window=window)
    ).run()
    assert world.layout == EVEN and len(world.moves) == 1
    assert world.moves[0][0] <= max(2 * window, 5)


def test_half_step_while_confidence_is_low():
    halves = []
    for seed in range(8):
        world = World(
            lambda i: heavy(slice(0, 8), 2.0), EVEN, 90, noise=gaussian(0.08), seed=seed
        ).run()
        halves += [d for _, d in world.moves[:1] if "half-way to" in d.reason]
        best = balance(model_costs(heavy(slice(0, 8), 2.0)), EVEN, (1.0,) * 4)
        final, ideal = (world.true_ms(x, heavy(slice(0, 8), 2.0)) for x in (world.layout, best))
        assert final < 1.1 * ideal
    assert len(halves) >= 2


def test_small_gain_in_much_noise_is_found_by_the_average():
    world = World(lambda i: heavy(slice(0, 6), 1.35), EVEN, 600, noise=gaussian(0.1)).run()
    assert any("on average of" in d.reason for _, d in world.moves)
    assert world.total_ms < world.static_ms
    assert len(world.moves) <= 6


def test_memory_in_which_nothing_fits_is_a_reason_to_stay():
    def no_room(*args):
        raise BalanceError("no split fits in memory: stage 0 needs 7 bytes")

    world = World(flat, UNEVEN, 9, choose=no_room).run()
    assert world.moves == []
    assert "no split fits in memory: stage 0 needs 7 bytes" in world.decisions[0][1].reason


def test_half_step_keeps_to_the_memory_limit():
    load = heavy(slice(0, 8), 2.0)

    def takes_half_steps(cap: float | None) -> bool:
        settings = TriggerSettings(memory_cap_bytes=cap)
        worlds = [
            World(lambda i: load, EVEN, 90, noise=gaussian(0.08), seed=seed, settings=settings)
            for seed in range(8)
        ]
        moves = [d for world in worlds for _, d in world.run().moves]
        assert moves
        return any("half-way" in d.reason for d in moves)

    assert takes_half_steps(None) and takes_half_steps(9.0 * LAYER_BYTES)
    assert not takes_half_steps(5.0 * LAYER_BYTES)


def test_virtual_stages_and_frozen_layers():
    def choose(costs: ModelCosts, layout: LayerLayout, speeds: tuple[float, ...]) -> LayerLayout:
        return min_max_layout(costs, 2, virtual_stages=2, stage_speeds=speeds, current=layout)

    layout = LayerLayout.from_boundaries([0, 5, 6, 11, 12], num_stages=2, virtual_stages=2)
    trigger = Trigger(TriggerSettings(), choose=choose)
    trigger.start(layout, 0, 500)
    costs = ModelCosts(
        tuple(LayerCost(n, 1.0, 0.0 if n <= 3 else 2.0) for n in range(1, 13)), num_microbatches=8
    )
    for i in range(1, 4):
        trigger.observe(i, costs, 300.0)
    decision = trigger.decide(3, 497)
    assert decision.action == "move"
    assert "guess: 5 iterations" in decision.reason
    trigger.moved(3, decision.new, 10.0)
    for i in range(4, 7):
        trigger.observe(i, costs, 200.0)
    assert trigger.decide(6, 494).action == "stay"


# -------------------------------------------------------------------- the same everywhere


def eventful(seed: int = 3, iterations: int = 400) -> World:
    def load(i: int) -> np.ndarray:
        return heavy(slice(0, 8), 2.0 if i > 150 else 1.0)

    def slowness(i: int) -> np.ndarray:
        return np.array([1.0, 1.0, 1.7 if 60 < i <= 100 else 1.0, 1.0])

    world = World(load, UNEVEN, iterations, slowness=slowness, noise=gaussian(0.02), seed=seed)
    world.trigger.announce([CostHint(151, n, 2.0, 2.0) for n in range(1, 9)])
    return world


def test_ranks_fed_the_same_numbers_decide_the_same():
    worlds = [eventful().run() for _ in range(3)]
    assert len(worlds[0].moves) >= 3
    for other in worlds[1:]:
        assert other.decisions == worlds[0].decisions
        assert other.trigger.state() == worlds[0].trigger.state()


@pytest.mark.parametrize("at", [0, 2, 5, 62, 64, 101, 149, 152, 155, 200])
def test_state_goes_through_json_and_the_run_goes_on_the_same(at):
    straight, stopped = eventful().run(), eventful().run(at)
    state = json.loads(json.dumps(stopped.trigger.state()))
    fresh = Trigger(TriggerSettings(), choose=balance)
    fresh.restore(state)
    fresh.start(stopped.layout, stopped.iteration, stopped.iterations - stopped.iteration)
    assert fresh.state() == state
    stopped.trigger = fresh
    stopped.run()
    assert stopped.decisions == straight.decisions


def test_restart_under_another_layout_begins_afresh():
    world = eventful().run(62)
    fresh = Trigger(TriggerSettings(), choose=balance)
    fresh.restore(json.loads(json.dumps(world.trigger.state())))
    fresh.start(LayerLayout.even(L, 2), 62, 100)
    assert fresh.decide(62, 100).reason == "0 of 3 iterations measured"


def test_move_that_nobody_asked_the_trigger_for_is_taken_as_it_is():
    world = World(flat, EVEN, 100)
    world.run(10)
    world.layout = UNEVEN
    world.trigger.moved(10, UNEVEN, 100.0, 10**9)
    world.run()
    assert world.moves[0][0] == 13
    assert world.moves[0][1].action == "move" and world.layout == EVEN
    assert "learned from 1 move)" in world.moves[0][1].reason


# -------------------------------------------------------------------- what is learned


def test_cost_of_moving_is_learned():
    cost = MoveCost()
    assert cost.estimate(2 * 10**9, 100.0)[0] == pytest.approx(2200.0)
    assert cost.estimate(0, 100.0)[0] == pytest.approx(500.0)
    cost.learn(10**9, 300.0)
    assert cost.estimate(10**9, 100.0) == (300.0, "learned from 1 move")
    assert cost.estimate(2 * 10**9, 100.0)[0] == pytest.approx(450.0)
    for _ in range(20):
        cost.learn(10**9, 100.0)
    assert cost.estimate(10**9, 100.0) == (100.0, "learned from 8 moves")


def test_horizon_shrinks_to_what_plans_lived_and_grows_with_a_lasting_gain():
    lives = PlanLives()
    assert lives.horizon(50, 1000) == 1000
    lives.end(20)
    lives.see_gain(True, 100)
    assert lives.horizon(103, 1000) == 17
    assert lives.horizon(103, 5) == 5
    lives.see_gain(True, 130)
    assert lives.horizon(160, 1000) == 60
    lives.see_gain(False, 160)
    lives.see_gain(True, 170)
    assert lives.horizon(173, 1000) == 17


def test_failed_layout_is_barred_twice_as_long_each_time():
    failed = FailedMoves()
    failed.add("Et|tL", 100, 30)
    assert failed.barred_until("Et|tL", 129) == 130
    assert failed.barred_until("Et|tL", 130) is None
    failed.add("Et|tL", 200, 30)
    assert failed.barred_until("Et|tL", 201) == 260
    assert failed.barred_until("E|ttL", 201) is None


def test_costs_that_claim_more_than_was_measured_are_scaled_down():
    def gain(iteration_ms: float) -> float:
        trigger = Trigger(TriggerSettings(), choose=balance)
        trigger.start(UNEVEN, 0, 1000)
        for i in range(1, 4):
            trigger.observe(i, model_costs(flat(i)), iteration_ms)
        return trigger.decide(3, 997).gain_pct

    honest = gain(world_ms(UNEVEN))
    assert gain(world_ms(UNEVEN) / 2) == pytest.approx(honest)
    assert gain(world_ms(UNEVEN) * 2) == pytest.approx(honest / 2)


def test_decision_is_plain_data():
    decision = World(flat, UNEVEN, 3).run().decisions[0][1]
    assert {f.name for f in dataclasses.fields(decision)} == {
        "action", "reason", "old", "new", "predicted_iteration_ms", "gain_pct",
        "migration_cost_ms",
    }  # fmt: skip
    assert "\n" not in decision.reason

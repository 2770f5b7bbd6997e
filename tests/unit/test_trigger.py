"""The trigger in closed loop with simulated runs, and its parts alone."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from megatron_dynmo.balancers.objective import min_max_layout
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.cost import LayerCost, ModelCosts, predict_layout_ms
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger import CostHint, Trigger, TriggerSettings
from megatron_dynmo.trigger_learning import FailedMoves, MoveCost, PlanLives
from megatron_dynmo.trigger_speeds import RankSpeeds
from tests.unit.trigger_world import LAYER_BYTES, World, balance, model_costs, share_out

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


# -------------------------------------------------------------------- a start, a step, a drift


@pytest.mark.parametrize("sd", [0.0, 0.02])
def test_uneven_start_is_repaired_after_the_first_window_and_then_left_alone(sd):
    world = World(flat, UNEVEN, 100, noise=gaussian(sd), exact=True).run()
    ((iteration, decision),) = world.moves
    assert iteration == 3 and decision.action == "move" and world.layout == EVEN
    assert world.total_ms < 0.75 * world.static_ms
    assert decision.old == UNEVEN and decision.new == EVEN
    assert decision.predicted_iteration_ms == pytest.approx(world.mean_ms(EVEN), rel=0.05)
    assert "of 97 iterations left" in decision.reason
    assert "guess: 2 iterations + 1.2 GB at 1 GB/s" in decision.reason
    assert world.decisions[1][1].reason == f"stay: {EVEN} is the best layout"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sd", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("at", [100, 101, 102])
def test_step_change_is_answered_within_one_full_window(sd, at, seed):
    def load(i: int) -> np.ndarray:
        return heavy(slice(0, 8), 2.0 if i > at else 1.0)

    world = World(load, EVEN, 150, noise=gaussian(sd), seed=seed).run()
    first_full_window_ends = (at + 2) // 3 * 3 + 3
    answered = world.moves[0][0]
    assert at < answered <= first_full_window_ends
    best = balance(model_costs(load(at + 1)), EVEN, (1.0,) * 4)
    settled = np.mean(world.times_ms[at + 20 :])
    assert settled < 1.05 * world.true_ms(best, load(at + 1))
    assert len(world.moves) <= 3


def test_slow_drift_is_followed():
    def load(i: int) -> np.ndarray:
        return heavy(slice(0, 6), 1 + 2 * i / 600)

    world = World(load, EVEN, 600, noise=gaussian(0.02)).run()
    best_now = balance(model_costs(load(600)), world.layout, (1.0,) * 4)
    assert world.true_ms(world.layout, load(600)) < 1.1 * world.true_ms(best_now, load(600))
    assert len(world.moves) <= 8
    best_static = min(
        world.mean_ms(EVEN.with_boundaries([0, a, b, c, L]))
        for a in range(3, 7)
        for b in range(a + 3, a + 8)
        for c in range(b + 5, b + 9)
        if c < L
    )
    assert world.total_ms / 600 < 1.02 * best_static


# -------------------------------------------------------------------- never worse than static

NOISES = {
    "1 %": lambda rng: rng.normal(1, 0.01, 16),
    "10 %": lambda rng: rng.normal(1, 0.1, 16).clip(0.1),
    "lognormal 30 %": lambda rng: np.exp(rng.normal(0, 0.3, 16)),
    "t with 2.5 degrees": lambda rng: 1 + 0.2 * np.abs(rng.standard_t(2.5, 16)),
    "Pareto 1.5": lambda rng: 1 + 0.05 * rng.pareto(1.5, 16),
    "rare 5x spikes": lambda rng: np.where(rng.random(16) < 0.01, 5, 1) * rng.normal(1, 0.02, 16),
    "whole ranks hiccup": lambda rng: (
        np.repeat(np.where(rng.random(2) < 0.01, 3, 1), 8) * rng.normal(1, 0.02, 16)
    ),
    "all together": lambda rng: np.exp(rng.normal(0, 0.3)) * rng.normal(1, 0.02, 16),
}


TEMPTING = ("lognormal 30 %", "t with 2.5 degrees")


@pytest.mark.parametrize("name", NOISES)
def test_ten_thousand_windows_of_pure_noise_cost_nothing(name):
    windows = 10_000 // len(NOISES)
    load = np.full(16, 3.0)
    layout = LayerLayout.even(16, 2)
    world = World(
        lambda i: load,
        layout,
        3 * windows,
        noise=NOISES[name],
        cost_ms=lambda layers: 50.0,
        choose=share_out,
        seed=7,
    ).run()
    assert len(world.decisions) == windows
    tempted = sum((d.gain_pct or 0) > 0 for _, d in world.decisions)
    assert tempted > 100 or name not in TEMPTING, "noise too weak to test anything"
    assert world.total_ms <= world.static_ms


@pytest.mark.parametrize("cost_ms", [10.0, 400.0])
@pytest.mark.parametrize("half_period", [1, 2, 3, 5, 8, 12, 20, 40])
def test_oscillating_load_neither_thrashes_nor_loses(half_period, cost_ms):
    def load(i: int) -> np.ndarray:
        at_front = i // half_period % 2
        return heavy(slice(0, 6) if at_front else slice(18, 24), 1.5)

    iterations = 240
    world = World(load, EVEN, iterations, noise=gaussian(0.02), cost_ms=lambda n: cost_ms).run()
    flips = iterations // half_period
    assert len(world.moves) <= min(2 * flips, 30)
    # What a first move costs before the swing is known, and nothing after.
    assert world.total_ms < world.static_ms + 2 * cost_ms + 3 * max(world.times_ms) * 0.15
    if half_period >= 40:
        assert world.total_ms < 0.97 * world.static_ms


def test_a_swing_too_fast_to_follow_is_learned():
    def load(i: int) -> np.ndarray:
        return heavy(slice(0, 6) if i // 6 % 2 else slice(18, 24), 1.5)

    world = World(load, EVEN, 600, noise=gaussian(0.01), cost_ms=lambda n: 500.0).run()
    assert len(world.moves) <= 6
    assert all(i <= 300 for i, _ in world.moves)


def test_nothing_moves_near_the_end():
    def load(i: int) -> np.ndarray:
        return heavy(slice(0, 8), 2.0 if i > 90 else 1.0)

    world = World(load, EVEN, 100, cost_ms=lambda n: 2_000.0).run()
    assert world.moves == []
    reason = world.decisions[-1][1].reason
    assert "does not pay for" in reason and "over 1 iterations" in reason


# -------------------------------------------------------------------- slow ranks


def slow_speeds(rank: int) -> tuple[float, ...]:
    return tuple(1 / 1.6 if r == rank else 1.0 for r in range(4))


@pytest.mark.parametrize("rank", range(4))
def test_straggling_rank_gets_fewer_layers_and_gets_them_back(rank):
    def slowness(i: int) -> np.ndarray:
        factors = np.ones(4)
        factors[rank] = 1.6 if 100 < i <= 250 else 1.0
        return factors

    world = World(flat, EVEN, 400, slowness=slowness, noise=gaussian(0.02), seed=rank)
    world.run(106)
    assert world.layout.num_layers_of_rank(rank) < 6
    assert f"rank {rank} 1." in world.moves[0][1].reason
    assert world.moves[0][1].reason.endswith("x slow")
    world.run(250)
    assert world.layout.num_layers_of_rank(rank) == 4
    slow_for_good = World(flat, world.layout, 20, slowness=lambda i: slowness(200))
    best = balance(model_costs(flat(1)), EVEN, slow_speeds(rank))
    assert slow_for_good.mean_ms(world.layout) <= 1.001 * slow_for_good.mean_ms(best)
    world.run(260)
    assert world.layout == EVEN
    world.run()
    assert world.layout == EVEN and len(world.moves) <= 4
    assert world.total_ms < 0.95 * world.static_ms


def test_rank_slow_from_the_start_is_told_by_the_layers_that_leave_it():
    def slowness(i: int) -> np.ndarray:
        return np.array([1.0, 2.0, 1.0, 1.0])

    world = World(flat, EVEN, 200, slowness=slowness, noise=gaussian(0.01)).run()
    assert world.layout.num_layers_of_rank(1) == 3
    assert "rank 1" in world.decisions[-1][1].reason
    assert len(world.moves) <= 3


def test_layers_that_become_heavy_together_are_not_taken_for_a_slow_rank_for_long():
    def load(i: int) -> np.ndarray:
        return heavy(slice(0, 6), 2.0 if i > 60 else 1.0)

    world = World(load, EVEN, 200).run()
    best = balance(model_costs(load(61)), EVEN, (1.0,) * 4)
    assert world.true_ms(world.layout, load(61)) == pytest.approx(world.true_ms(best, load(61)))
    assert "slow" not in world.decisions[-1][1].reason


def changed(speeds: RankSpeeds, times: np.ndarray, layout: LayerLayout) -> bool:
    return speeds.sees_change(times, layout) and speeds.see_window(times, layout, 0.05)


def test_pruned_or_frozen_stage_is_not_a_fast_rank():
    speeds = RankSpeeds(4)
    times = np.full((2, L + 2), 1.0)
    changed(speeds, times, EVEN)
    halved = times.copy()
    halved[:, 6:12] *= 0.5
    assert not changed(speeds, halved, EVEN)
    frozen = times.copy()
    frozen[1, 6:12] = 0.0
    assert not changed(speeds, frozen, EVEN)
    dearer_backward = times.copy()
    dearer_backward[1, 6:12] *= 2.0
    assert not changed(speeds, dearer_backward, EVEN)
    assert speeds.all_healthy and speeds.speeds == (1.0,) * 4


def test_whole_model_getting_slower_is_no_slow_rank():
    speeds = RankSpeeds(2)
    layout = LayerLayout.even(8, 2)
    times = np.full((2, 10), 1.0)
    changed(speeds, times, layout)
    assert not changed(speeds, times * 2, layout)
    one_of_two = times * 2
    one_of_two[:, :4] *= 1.5
    assert changed(speeds, one_of_two, layout)
    assert speeds.slowness.tolist() == [1.5, 1.0]


# -------------------------------------------------------------------- moves that do not pay


def lying_world(iterations: int = 600, **kwargs) -> World:
    """Costs promise 8 % of other layouts, which in truth take 20 % longer."""
    return World(
        lambda i: heavy(slice(0, 6), 4 / 3),
        EVEN,
        iterations,
        truth_factor=lambda layout: 1.0 if layout == EVEN else 1.2,
        noise=gaussian(0.002),
        cost_ms=lambda layers: 40.0,
        **kwargs,
    )


def test_move_that_did_not_pay_is_rolled_back_in_the_next_window_and_not_repeated_at_once():
    world = lying_world().run()
    moves = [(i, d) for i, d in world.moves if d.action == "move"]
    rollbacks = [(i, d) for i, d in world.moves if d.action == "rollback"]
    assert moves and len(rollbacks) == len(moves)
    for (moved, move), (undone, rollback) in zip(moves, rollbacks, strict=True):
        assert undone == moved + 3
        assert rollback.old == move.new and rollback.new == EVEN
        assert f"after iteration {moved} promised to save" in rollback.reason
        assert rollback.gain_pct > 5
    gaps = np.diff([i for i, _ in moves])
    assert (gaps >= 30).all() and (np.diff(gaps) >= 0).all() and gaps[-1] > gaps[0]
    assert world.layout == EVEN
    assert world.total_ms < 1.01 * world.static_ms
    assert any("failed before; not again until" in d.reason for _, d in world.decisions) or any(
        "cooldown until" in d.reason for _, d in world.decisions
    )


def test_rollback_stays_due_when_it_is_refused():
    world = lying_world()
    world.run(3)
    assert world.layout != EVEN
    trigger, refused_at = world.trigger, None
    while refused_at is None and world.iteration < 30:
        apply, world.apply = world.apply, lambda decision: None
        world.step()
        world.apply = apply
        last = world.decisions[-1][1]
        if last.action == "rollback":
            refused_at = world.iteration
            trigger.refused(world.iteration, last.new, "a rank had no memory")
    world.run(refused_at + 40)
    undone = [i for i, d in world.moves if d.action == "rollback" and i > refused_at]
    assert undone and world.layout == EVEN


def test_refused_move_backs_off():
    trigger = Trigger(TriggerSettings(), choose=balance)
    trigger.start(UNEVEN, 0, 1000)
    tried = []
    for i in range(1, 200):
        trigger.observe(i, model_costs(flat(i)), world_ms(UNEVEN))
        if trigger.is_due(i) and trigger.decide(i, 1000 - i).is_move:
            tried.append(i)
            trigger.refused(i, EVEN, "no memory")
    assert tried[0] == 3 and len(tried) in (3, 4)
    assert (np.diff(np.diff(tried)) > 0).all()


def world_ms(layout: LayerLayout) -> float:
    return predict_layout_ms(model_costs(flat(0)), layout)


# -------------------------------------------------------------------- announced changes


def pruned_from(first: int):
    def load(i: int) -> np.ndarray:
        return heavy(slice(0, 12), 0.4 if i >= first else 1.0)

    return load


def hints(first: int, factor: float = 0.4) -> list[CostHint]:
    return [CostHint(first, n, factor, factor) for n in range(1, 13)]


@pytest.mark.parametrize("first", [50, 51, 52])
def test_announced_change_acts_before_its_first_iteration(first):
    world = World(pruned_from(first), EVEN, 200, noise=gaussian(0.01))
    world.trigger.announce(hints(first))
    world.run()
    iteration, decision = world.moves[0]
    assert iteration == first - 1
    assert "ahead of an announced change" in decision.reason
    best = balance(model_costs(pruned_from(first)(first)), world.layout, (1.0,) * 4)
    after = world.times_ms[first - 1 :]
    assert max(after) < 1.2 * world.true_ms(best, pruned_from(first)(first))
    assert len(world.moves) <= 2


def test_measured_time_overrides_an_announcement_that_was_wrong():
    world = World(flat, EVEN, 200, noise=gaussian(0.01))
    world.trigger.announce(hints(50))
    world.run()
    assert world.moves[0][0] == 49
    assert world.moves[1][0] == 52
    assert world.layout == EVEN and len(world.moves) == 2


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
    assert world.decisions[0][1].reason == f"stay: best layout {best} gains {gain:.1f} % (< 2 %)"
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
    assert world.decisions[0][1].reason == "stay: next decision at 10"


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
    assert fresh.decide(62, 100).reason == "stay: 0 of 3 iterations measured"


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

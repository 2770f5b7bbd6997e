"""The trigger in closed loop with simulated runs, and its parts alone."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.trigger import CostHint, Trigger, TriggerSettings
from megatron_dynmo.trigger.speeds import RankSpeeds
from tests.unit.trigger_world import (
    EVEN,
    UNEVEN,
    L,
    World,
    balance,
    flat,
    gaussian,
    heavy,
    model_costs,
    share_out,
    world_ms,
)

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
    assert world.decisions[1][1].reason == f"{EVEN} is the best layout"


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
    assert tempted > 30 or name not in TEMPTING, "noise too weak to test anything"
    assert world.total_ms <= world.static_ms


def test_two_slow_iterations_of_three_are_not_enough():
    world = World(lambda i: heavy(slice(0, 8), 1.5 if i > 31 else 1.0), EVEN, 33).run()
    assert world.moves == []
    reason = world.decisions[-1][1].reason
    assert "in the median, but not in all 3 iterations" in reason


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


def test_one_layer_shows_that_a_slow_rank_recovered_but_not_that_it_became_slow():
    speeds = RankSpeeds(4)
    one_left = EVEN.with_boundaries([0, 9, 10, 17, 24])
    times = np.full((2, L + 2), 1.0)
    changed(speeds, times, EVEN)
    slow = times.copy()
    slow[:, 6:12] *= 2.0
    assert changed(speeds, slow, EVEN)
    assert speeds.slowness.tolist() == [1.0, 2.0, 1.0, 1.0]
    still_slow = times.copy()
    still_slow[:, 9] *= 2.0
    assert not changed(speeds, still_slow, one_left)
    assert changed(speeds, times, one_left)
    assert speeds.all_healthy
    assert not changed(speeds, still_slow, one_left)


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

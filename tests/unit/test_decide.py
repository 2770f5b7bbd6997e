"""From measured windows to decisions: what the configured balancer proposes, and what is said."""

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_dynmo import decide
from megatron_dynmo.balancers import min_max_layout, prediction
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts, predict_layout_ms
from megatron_dynmo.decide import Decider
from megatron_dynmo.layout import LayerLayout

LATE_OPTIMIZER = ModelCosts(
    # Two micro-batches: the optimizer step of the fullest stage counts as much as the slowest one.
    tuple(LayerCost(n, 1.0, 1.0, 100, optimizer_ms=9.0 if n <= 3 else 0.0) for n in range(1, 7)),
    num_microbatches=2,
)


def decider(layout, device_memory_bytes=None, **settings):
    run = SimpleNamespace(first_iteration=0, train_iters=100_000, memory=None)
    return Decider(DynMoConfig(**settings), run, layout, device_memory_bytes)


def decision(costs, layout, **settings):
    """What is decided after a window in which iterations took what the costs predict."""
    report = SimpleNamespace(costs=costs, iteration_ms=predict_layout_ms(costs, layout))
    return decider(layout, **settings).decide(3, [(number, report) for number in (1, 2, 3)])


def proposed(costs, layout, **settings):
    """What the balancer proposes to the trigger on healthy ranks."""
    return decider(layout, **settings)._choose(costs, layout, (1.0,) * layout.num_stages)


def on_two(*inner, num_layers=6):
    return LayerLayout.from_boundaries([0, *inner, num_layers], num_stages=2)


def test_partition_is_improved_by_the_iteration_time_and_says_so():
    found = decision(LATE_OPTIMIZER, on_two(5))
    assert found.action == "move"
    assert min_max_layout(LATE_OPTIMIZER, 2).boundaries == [0, 3, 6]
    assert found.new.boundaries == [0, 2, 6]
    assert f"{found.new}: predicted 38.000 ms against 45.000 ms for {on_two(3)}" in found.reason
    assert "\n" not in found.reason


def test_nothing_is_said_where_both_agree():
    costs = ModelCosts(tuple(LayerCost(n, 1.0, 1.0) for n in range(1, 7)), num_microbatches=16)
    found = decision(costs, on_two(6))
    assert found.action == "move"
    assert found.new.boundaries == [0, 3, 6]
    assert "predicted" not in found.reason


def test_the_memory_limit_holds_for_the_improvement():
    # Four layers on the last stage would be faster, but only three fit.
    assert proposed(LATE_OPTIMIZER, on_two(3), device_memory_bytes=300) == on_two(3)
    assert proposed(LATE_OPTIMIZER, on_two(3), memory_cap_gb=300e-9) == on_two(3)
    assert proposed(LATE_OPTIMIZER, on_two(3), memory_cap_gb=400e-9) == on_two(2)
    # Nor does one that is in force stay when it has grown beyond the limit.
    assert proposed(LATE_OPTIMIZER, on_two(2), device_memory_bytes=300) == on_two(3)


def test_slow_ranks_count():
    chosen = decider(on_two(3))._choose(LATE_OPTIMIZER, on_two(3), (1.0, 0.25))
    assert chosen.chunk_boundaries[1] > 3


@pytest.mark.parametrize("balancer", ["partition", "diffusion"])
def test_a_slow_rank_keeps_a_layer_by_which_its_recovery_is_seen(balancer):
    costs = ModelCosts(tuple(LayerCost(n, 1.0, 2.0) for n in range(1, 7)), num_microbatches=8)
    layout = on_two(3)
    chosen = decider(layout, balancer=balancer)._choose(costs, layout, (1.0, 0.01))
    assert chosen == on_two(5)


@pytest.mark.parametrize("weight", ["params", "memory"])
def test_where_layers_weigh_bytes_no_iteration_time_is_predicted(weight):
    assert proposed(LATE_OPTIMIZER, on_two(5), weight=weight) == on_two(3)


def test_too_large_a_comparison_leaves_the_min_max_layout(monkeypatch):
    monkeypatch.setattr(decide, "_MAX_WORK", 0)
    assert proposed(LATE_OPTIMIZER, on_two(5)) == on_two(3)


def test_a_decision_at_large_size_does_not_compare_all_neighbours(monkeypatch):
    timed = []
    finish_times = prediction.finish_times

    def counted(schedule, forward_ms, *rest):
        timed.append(len(forward_ms))
        return finish_times(schedule, forward_ms, *rest)

    monkeypatch.setattr(prediction, "finish_times", counted)
    layers = tuple(LayerCost(n, 1.0 + n % 3, 2.0 + n % 5) for n in range(1, 129))
    layout = LayerLayout.even(128, 64)
    costs = ModelCosts(layers, num_microbatches=64)
    at_most = min_max_layout(costs, 64, min_layers=0, current=layout)
    chosen = proposed(costs, layout)
    assert predict_layout_ms(costs, chosen) <= predict_layout_ms(costs, at_most)
    assert 1 <= len(timed) <= 4
    timed.clear()
    proposed(dataclasses.replace(costs, num_microbatches=1024), layout)
    assert timed == []


def test_diffusion_is_taken_as_it_is():
    assert proposed(LATE_OPTIMIZER, on_two(5), balancer="diffusion") == on_two(3)


def test_mtp_keeps_the_last_layer_where_it_is():
    # The optimizer step of the last layer and that of the output layer, on one stage, count double.
    layers = tuple(LayerCost(n, 1.0, 1.0, optimizer_ms=50.0 * (n == 6)) for n in range(1, 7))
    costs = ModelCosts(layers, last_stage_extra=ExtraCost(optimizer_ms=50.0), num_microbatches=2)
    few = LayerLayout.from_boundaries([0, 5, 6], num_stages=2)
    assert proposed(costs, few) == on_two(6)
    layout = LayerLayout.from_megatron("Et*5|tmL", num_layers=6, num_stages=2)
    assert proposed(costs, layout).to_megatron() == "Et*3|t*3mL"


def learned():
    """A decider after a window and a move, and the text that a checkpoint would hold."""
    first = decider(on_two(5))
    report = SimpleNamespace(costs=LATE_OPTIMIZER, iteration_ms=40.0)
    found = first.decide(3, [(number, report) for number in (1, 2, 3)])
    first.moved(3, found.new, SimpleNamespace(duration_ms=7.0, num_bytes=300))
    first.remember()
    return found.new, first._run.memory


def resumed(layout, memory):
    run = SimpleNamespace(first_iteration=3, train_iters=100_000, memory=memory)
    return Decider(DynMoConfig(), run, layout)


def test_what_was_learned_goes_on_after_a_restart():
    layout, memory = learned()
    second = resumed(layout, memory)
    assert second._trigger.state() == resumed(layout, memory)._trigger.state()
    assert second._trigger._app.move_cost.estimate(300, 40.0) == (7.0, "learned from 1 move")
    second.remember()
    assert second._run.memory == memory


def test_under_another_layout_measurements_count_no_more():
    layout, memory = learned()
    other = resumed(layout.with_boundaries([0, 4, 6]), memory)
    assert other._trigger._app.history.num_since(0) == 0


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '"x"', '{"layout": 3}', '{"layout": [[0, 1], 1]}']
)
def test_a_damaged_memory_is_left_with_a_warning(text, caplog):
    layout, _ = learned()
    fresh = resumed(layout, text)
    assert "it is learned anew" in caplog.text
    assert fresh._trigger.state() == resumed(layout, None)._trigger.state()

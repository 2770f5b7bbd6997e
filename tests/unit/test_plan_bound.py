"""Bounds that no layout beats, against all layouts."""

import random
from itertools import combinations

import pytest

from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts, predict_layout_ms
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.planner.bound import iteration_bound_ms, stage_bound_ms
from megatron_dynmo.planner.layout_report import report_layout
from megatron_dynmo.planner.question import Question


def all_layouts(num_layers, num_stages, virtual_stages, min_layers):
    chunks = num_stages * virtual_stages
    numbers = range(num_layers + chunks - 1 - chunks * min_layers)
    for cuts in combinations(numbers, chunks - 1):
        inner = [cut - at + (at + 1) * min_layers for at, cut in enumerate(cuts)]
        yield LayerLayout.from_boundaries(
            [0, *inner, num_layers], num_stages=num_stages, virtual_stages=virtual_stages
        )


def random_costs(rng, num_layers, num_microbatches):
    return ModelCosts(
        tuple(
            LayerCost(
                number,
                rng.choice((0.5, 1.0, 4.0)),
                rng.choice((1.0, 2.0, 6.0)),
                optimizer_ms=rng.choice((0.0, 3.0)),
            )
            for number in range(1, num_layers + 1)
        ),
        ExtraCost(rng.choice((0.0, 0.3)), rng.choice((0.0, 0.5))),
        ExtraCost(rng.choice((0.0, 1.0, 9.0)), rng.choice((0.0, 2.0, 9.0))),
        num_microbatches=num_microbatches,
        p2p_ms=rng.choice((0.0, 0.2)),
    )


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_no_layout_beats_the_bounds(virtual_stages):
    rng, tight = random.Random(3), 0
    for _ in range(60):
        stages = rng.choice((2, 3))
        microbatches = rng.randint(1, 9) if virtual_stages == 1 else stages * rng.randint(1, 3)
        costs = random_costs(rng, 7, microbatches)
        min_layers = rng.choice((0, 1))
        question = Question(costs, stages, virtual_stages, min_layers)
        layouts = list(all_layouts(7, stages, virtual_stages, min_layers))
        assert len(set(layouts)) == len(layouts) > 1
        best = min(predict_layout_ms(costs, layout) for layout in layouts)
        bound = iteration_bound_ms(question)
        assert bound <= best * (1 + 1e-9)
        tight += bound > best * (0.9 if virtual_stages == 1 else 0.6)
        slowest = min(report_layout(costs, layout).slowest_ms for layout in layouts)
        if virtual_stages == 1:
            assert stage_bound_ms(question) == pytest.approx(slowest)
        else:
            assert stage_bound_ms(question) <= slowest * (1 + 1e-9)
    assert tight >= 30


@pytest.mark.parametrize("microbatches", [4, 5, 64])
def test_equal_stages_reach_the_bound_when_the_last_one_is_the_slowest(microbatches):
    # One layer a stage is the only layout, and 1F1B of equal stages ends at (M + P - 1)(f + b).
    layers = tuple(LayerCost(number, 1.0, 2.0) for number in range(1, 5))
    costs = ModelCosts(layers, num_microbatches=microbatches)
    question = Question(costs, 4)
    assert stage_bound_ms(question) == 3.0
    assert iteration_bound_ms(question) == pytest.approx((microbatches + 3) * 3.0)


def test_a_bound_of_many_layers_takes_no_time_to_speak_of():
    layers = tuple(LayerCost(n, 1.0 + n % 3, 2.0 + n % 5) for n in range(1, 10_001))
    question = Question(ModelCosts(layers, num_microbatches=4000), 1000)
    assert iteration_bound_ms(question) > 4000 * stage_bound_ms(question)

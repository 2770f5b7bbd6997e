"""Predictions for many splits at once, against the functions that predict one layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynmo.balancers.prediction import SplitPredictions
from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts, predict_layout_ms, stage_costs
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.pipeline_schedule import rank_order

NUM_LAYERS, NUM_SPLITS = 9, 8


@st.composite
def cases(draw):
    """(costs, splits, num_stages, virtual_stages, speeds, schedule)."""
    virtual_stages = draw(st.integers(1, 3))
    num_stages = draw(st.integers(1 if virtual_stages == 1 else 2, 5))
    microbatches = draw(st.integers(1, 12))
    if virtual_stages > 1:
        microbatches = num_stages * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    zeros = draw(st.floats(0, 1))

    def numbers(*shape):
        return (rng.uniform(0, 9, shape) * (rng.random(shape) > zeros)).tolist()

    layers = tuple(
        LayerCost(n, f, b, int(10 * m), int(10 * a), r, o)
        for n, (f, b, m, a, r, o) in enumerate(numbers(NUM_LAYERS, 6), 1)
    )
    extras = [ExtraCost(f, b, int(m), int(a), r, o) for f, b, m, a, r, o in numbers(2, 6)]
    p2p_ms = draw(st.sampled_from((0.0, 0.3, 5.0)))
    costs = ModelCosts(layers, *extras, num_microbatches=microbatches, p2p_ms=p2p_ms)
    inner = np.sort(rng.integers(0, NUM_LAYERS + 1, (NUM_SPLITS, num_stages * virtual_stages - 1)))
    splits = np.hstack(
        [np.zeros((NUM_SPLITS, 1), int), inner, np.full((NUM_SPLITS, 1), NUM_LAYERS)]
    )
    speeds = draw(st.sampled_from((None, rng.uniform(0.3, 1, num_stages).tolist())))
    schedule = "1f1b" if virtual_stages == 1 else "interleaved"
    return costs, splits, num_stages, virtual_stages, speeds, schedule


def layouts(splits, num_stages, virtual_stages):
    for row in splits.tolist():
        yield LayerLayout.from_boundaries(row, num_stages=num_stages, virtual_stages=virtual_stages)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_times_are_those_of_each_layout_and_the_bound_is_below(case):
    costs, splits, num_stages, virtual_stages, speeds, schedule = case
    predictions = SplitPredictions(costs, num_stages, virtual_stages, speeds, schedule)
    times = predictions.iteration_ms(splits)
    alone = [
        predict_layout_ms(costs, layout, stage_speeds=speeds)
        for layout in layouts(splits, num_stages, virtual_stages)
    ]
    np.testing.assert_allclose(times, alone, rtol=1e-12, atol=1e-9)
    bounds = predictions.at_least_ms(splits)
    assert (bounds <= times * (1 + 1e-12) + 1e-9).all()


@pytest.mark.parametrize("virtual_stages, share", [(1, 0.95), (2, 0.75)])
def test_the_bound_is_near(virtual_stages, share):
    rng, ratios = np.random.default_rng(3), []
    for _ in range(50):
        layers = tuple(LayerCost(n, *rng.uniform(1, 2, 2)) for n in range(1, 25))
        costs = ModelCosts(layers, num_microbatches=16, p2p_ms=0.1)
        schedule = "1f1b" if virtual_stages == 1 else "interleaved"
        predictions = SplitPredictions(costs, 4, virtual_stages, None, schedule)
        inner = np.sort(rng.integers(0, 25, (1, 4 * virtual_stages - 1)))
        split = np.hstack([[[0]], inner, [[24]]])
        ratios.append(float((predictions.at_least_ms(split) / predictions.iteration_ms(split))[0]))
    assert min(ratios) > 0 and np.mean(ratios) > share


def test_the_bound_of_equal_stages_is_their_time():
    costs = ModelCosts(
        tuple(LayerCost(n, 1.0, 2.0) for n in range(1, 9)), num_microbatches=6, p2p_ms=0.5
    )
    predictions = SplitPredictions(costs, 4, 1, None, "1f1b")
    split = np.array([[0, 2, 4, 6, 8]])
    free = SplitPredictions(ModelCosts(costs.layers, num_microbatches=6), 4, 1, None, "1f1b")
    assert free.at_least_ms(split) == free.iteration_ms(split) == [(6 + 4 - 1) * 6.0]
    assert predictions.at_least_ms(split) <= predictions.iteration_ms(split)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_peak_memory_by_running_the_order_of_the_passes(case):
    costs, splits, num_stages, virtual_stages, speeds, schedule = case
    expected = []
    for layout in layouts(splits, num_stages, virtual_stages):
        chunks = stage_costs(costs, layout)
        peaks = []
        for rank in range(num_stages):
            mine = chunks[rank::num_stages]
            now = peak = sum(chunk.memory_bytes for chunk in mine)
            for direction, vp_stage, _ in rank_order(
                schedule, rank, num_stages, costs.num_microbatches, virtual_stages=virtual_stages
            ):
                now += mine[vp_stage].activation_bytes * (1 if direction == "forward" else -1)
                peak = max(peak, now)
            peaks.append(peak)
        expected.append(max(peaks))
    predictions = SplitPredictions(costs, num_stages, virtual_stages, speeds, schedule)
    assert predictions.peak_bytes(splits).tolist() == expected

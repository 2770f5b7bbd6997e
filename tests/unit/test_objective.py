"""Layouts are chosen by predicted iteration time, and the reason is said."""

import random
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from megatron_dynmo.balancers import choose_layout, min_max_layout, partition
from megatron_dynmo.balancers.climb import Budget, climb
from megatron_dynmo.balancers.objective import largest_stage_ms
from megatron_dynmo.balancers.prediction import SplitPredictions
from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts, predict_layout_ms, stage_costs
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.layout import LayerLayout


def model(times, num_microbatches=8, **kwargs):
    layers = tuple(
        LayerCost(n, f, b, memory_bytes=10, activation_bytes=1) for n, (f, b) in enumerate(times, 1)
    )
    return ModelCosts(layers, num_microbatches=num_microbatches, **kwargs)


def all_layouts(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield LayerLayout.from_boundaries([0, *inner, num_layers], num_stages=num_stages)


def test_never_worse_than_min_max_nor_than_the_current_layout():
    rng, better = random.Random(5), 0
    for _ in range(60):
        times = [(rng.randint(1, 9), rng.randint(1, 18)) for _ in range(9)]
        costs = model(times, rng.randint(1, 8), p2p_ms=rng.choice((0.0, 0.5)))
        current = rng.choice(list(all_layouts(9, 3)))
        choice = choose_layout(costs, 3, current=current)
        assert choice.iteration_ms == predict_layout_ms(costs, choice.layout)
        assert choice.iteration_ms <= choice.min_max_iteration_ms
        assert choice.iteration_ms <= predict_layout_ms(costs, current)
        best = min(predict_layout_ms(costs, layout) for layout in all_layouts(9, 3))
        assert choice.iteration_ms <= best * 1.1
        better += choice.iteration_ms < choice.min_max_iteration_ms
    assert better > 5  # the prediction does decide


def test_min_max_layout_is_the_exact_partition_of_whole_layers():
    costs = model([(3, 6), (1, 2), (1, 2), (4, 8)], last_stage_extra=ExtraCost(1.0, 2.0))
    layout = min_max_layout(costs, 2)
    assert layout.boundaries == partition([9, 3, 3, 12], 2, last_stage_extra=3.0) == [0, 3, 4]
    assert largest_stage_ms(costs, layout) == 15.0
    assert largest_stage_ms(costs, layout, [0.5, 1.0]) == 30.0


def test_the_reason_tells_when_iteration_time_beats_the_slowest_stage():
    # One micro-batch only: its way through the pipeline is the same in every split, but the
    # optimizer step of the fullest stage ends the iteration.
    layers = tuple(LayerCost(n, 1.0, 1.0, optimizer_ms=9.0 if n <= 3 else 0.0) for n in range(1, 7))
    costs = ModelCosts(layers, num_microbatches=1)
    choice = choose_layout(costs, 2)
    assert choice.min_max.boundaries == [0, 3, 6]
    assert choice.layout != choice.min_max
    assert choice.iteration_ms < choice.min_max_iteration_ms
    assert "though its slowest stage" in choice.reason
    assert choice.reason.startswith(f"{choice.layout}: predicted {choice.iteration_ms:.3f} ms")


def test_the_reason_when_both_agree():
    choice = choose_layout(model([(1, 2)] * 4), 2)
    assert choice.layout.boundaries == [0, 2, 4]
    assert "fastest slowest stage, and predicted best" in choice.reason


def test_a_layout_as_good_as_any_stays():
    # Five equal layers on two stages: 3 + 2 and 2 + 3 have the same slowest stage.
    current = LayerLayout.from_boundaries([0, 2, 5], num_stages=2)
    costs = model([(1, 2)] * 5, num_microbatches=2)
    choice = choose_layout(costs, 2, current=current)
    assert choice.iteration_ms == min(predict_layout_ms(costs, x) for x in all_layouts(5, 2))
    best = LayerLayout.from_boundaries(choice.layout.boundaries, num_stages=2)
    assert choose_layout(costs, 2, current=best).layout == best


def test_slow_ranks_get_fewer_layers():
    choice = choose_layout(model([(1, 2)] * 12), 3, stage_speeds=[1.0, 0.5, 1.0])
    sizes = [b - a for a, b in pairwise(choice.layout.boundaries)]
    assert sizes == [5, 2, 5]


def test_memory_limit_holds_for_every_candidate():
    # 10 bytes a layer and 1 for each micro-batch in flight: two on stage 0, one on stage 1. So
    # three layers on both need 46 and 33 bytes, two and four need 34 and 44.
    embedding = ExtraCost(memory_bytes=10)
    costs = model([(1, 2)] * 6, num_microbatches=4, first_stage_extra=embedding)
    assert choose_layout(costs, 2).layout.boundaries == [0, 3, 6]
    tight = choose_layout(costs, 2, stage_memory_limit=44)
    assert tight.layout.boundaries == [0, 2, 6]
    with pytest.raises(BalanceError, match="no split fits in memory"):
        choose_layout(costs, 2, stage_memory_limit=30)


def test_virtual_stages_are_interleaved():
    choice = choose_layout(model([(1, 2)] * 8), 2, virtual_stages=2)
    assert choice.layout.virtual_stages == 2
    assert choice.layout.boundaries == [0, 2, 4, 6, 8]
    assert choice.iteration_ms == (8 * 2 + 1) * 6.0


def test_mtp_layers_stay_in_the_last_chunk():
    current = LayerLayout.from_megatron("Et*5|tmL", num_layers=6, num_stages=2)
    choice = choose_layout(model([(1, 2)] * 6), 2, current=current)
    assert choice.layout.to_megatron() == "Et*3|t*3mL"
    alone = LayerLayout.from_megatron("Et*5|tm|L", num_layers=6, num_stages=3)
    with pytest.raises(BalanceError, match="MTP layers before the last chunk"):
        choose_layout(model([(1, 2)] * 6), 3, current=alone)


def test_a_current_layout_of_another_shape_is_refused():
    with pytest.raises(BalanceError, match=r"\(6, 3, 1\).*\(6, 2, 1\)"):
        choose_layout(model([(1, 2)] * 6), 2, current=LayerLayout.even(6, 3))


def peak_bytes(costs, layout):
    return max(
        stage.memory_bytes
        + stage.activation_bytes * min(costs.num_microbatches, layout.num_stages - stage.pp_rank)
        for stage in stage_costs(costs, layout)
    )


def one_by_one(costs, current, min_max, speeds, limit, min_layers):
    """The same choice, each neighbour predicted alone by the public functions of `cost`."""

    def predict(layout):
        return predict_layout_ms(costs, layout, stage_speeds=speeds)

    def around(layout):
        inner = layout.num_chunks - 1
        runs = [(n, first) for n in range(1, inner + 1) for first in range(1, inner + 2 - n)]
        for (length, first), step in product(runs, (-1, 1)):
            bounds = layout.boundaries
            for boundary in range(first, first + length):
                bounds[boundary] += step
            if min(b - a for a, b in pairwise(bounds)) >= min_layers:
                other = layout.with_boundaries(bounds)
                if limit is None or peak_bytes(costs, other) <= limit:
                    yield other

    starts = [min_max]
    if limit is None or peak_bytes(costs, current) <= limit:
        starts.insert(0, current)
    ends = []
    for at in starts:
        while (other := min(around(at), key=predict, default=at)) != at:
            if predict(other) >= predict(at) * (1 - 1e-9):
                break
            at = other
        ends.append(at)
    best = min(ends, key=lambda layout: round(predict(layout), 6))
    gains = predict(best) < predict(current) * (1 - 1e-3)
    return best if gains or starts[0] != current else current


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_timing_all_neighbours_at_once_chooses_what_timing_one_by_one_does(virtual_stages):
    rng, changed = random.Random(11), 0
    for _ in range(60):
        num_stages = rng.randint(2, 4)
        layers = tuple(
            LayerCost(
                n, rng.randint(1, 9), rng.randint(1, 18), 10, rng.randint(0, 3),
                reduce_ms=rng.choice((0, 0, 16)), optimizer_ms=rng.choice((0, 0, 32)),
            )
            for n in range(1, 13)
        )  # fmt: skip
        costs = ModelCosts(
            layers, ExtraCost(1, 2, 5, 1), ExtraCost(rng.randint(0, 9), 4, 5, 1),
            num_microbatches=num_stages * rng.randint(1, 4), p2p_ms=rng.choice((0.0, 0.5, 4.0)),
        )  # fmt: skip
        speeds = rng.choice((None, [rng.choice((0.5, 1.0)) for _ in range(num_stages)]))
        inner = sorted(rng.sample(range(1, 12), num_stages * virtual_stages - 1))
        current = LayerLayout.from_boundaries(
            [0, *inner, 12], num_stages=num_stages, virtual_stages=virtual_stages
        )
        min_layers = rng.choice((0, 1))
        limit = None
        if virtual_stages == 1 and rng.random() < 0.5:
            free = min_max_layout(costs, num_stages, stage_speeds=speeds, min_layers=min_layers)
            limit = peak_bytes(costs, free) + rng.randint(0, 9)
        choice = choose_layout(
            costs, num_stages, virtual_stages=virtual_stages, stage_speeds=speeds,
            stage_memory_limit=limit, min_layers=min_layers, current=current,
        )  # fmt: skip
        expected = one_by_one(costs, current, choice.min_max, speeds, limit, min_layers)
        assert choice.layout == expected
        predicted = predict_layout_ms(costs, expected, stage_speeds=speeds)
        assert choice.iteration_ms == pytest.approx(predicted, rel=1e-12)
        changed += choice.layout not in (choice.min_max, current)
    assert changed > 10


def test_a_layer_is_handed_through_stages_that_none_may_keep():
    # One too many on the first stage, one too few on the last; a stage between that keeps it is
    # as slow as the first one was.
    costs = model([(1, 1)] * 16, num_microbatches=16)
    splits = SplitPredictions(costs, 4, 1, None, "1f1b")
    end, _ = climb((0, 5, 9, 13, 16), splits.iteration_ms, Budget(1000))
    assert end == (0, 4, 8, 12, 16)


def test_without_time_to_compare_the_min_max_layout_is_the_answer():
    layers = tuple(LayerCost(n, 1.0, 1.0, optimizer_ms=9.0 if n <= 3 else 0.0) for n in range(1, 7))
    costs = ModelCosts(layers, num_microbatches=1)
    choice = choose_layout(costs, 2, max_work=1e4)
    assert choice.layout == choice.min_max
    assert choice.layout.boundaries == [0, 3, 6]
    assert choice.iteration_ms is None
    assert "not compared" in choice.reason
    # Enough for the two that are there, not for their neighbours.
    costs = ModelCosts(layers, num_microbatches=2)
    worse = LayerLayout.from_boundaries([0, 5, 6], num_stages=2)
    some = choose_layout(costs, 2, current=worse, max_work=8e4)
    assert some.layout == some.min_max
    assert some.iteration_ms == predict_layout_ms(costs, some.min_max)
    better = LayerLayout.from_boundaries([0, 2, 6], num_stages=2)
    assert choose_layout(costs, 2, current=better, max_work=8e4).layout == better


@pytest.mark.parametrize("num_stages, virtual_stages", [(4, 1), (2, 2), (1, 1)])
def test_a_split_without_neighbours_is_the_answer(num_stages, virtual_stages):
    costs = model([(1, 2)] * num_stages * virtual_stages)
    for limit in (None, 10_000):
        choice = choose_layout(
            costs, num_stages, virtual_stages=virtual_stages, stage_memory_limit=limit
        )
        assert choice.layout == LayerLayout.even(
            num_stages * virtual_stages, num_stages, virtual_stages=virtual_stages
        )


def test_memory_of_interleaved_candidates_counts_activations_in_flight():
    # Only the activations are large, and rank 0 has more of them in flight than rank 1.
    layers = tuple(
        LayerCost(n, 1.0, 1.0, 0, 10, optimizer_ms=99.0 if n == 3 else 0.0) for n in range(1, 9)
    )
    costs = ModelCosts(layers, num_microbatches=4)
    free = choose_layout(costs, 2, virtual_stages=2)
    held = SplitPredictions(costs, 2, 2, None, "interleaved").peak_bytes
    rows = np.array([free.min_max.boundaries, [0, 3, 4, 6, 8]])
    assert held(rows).tolist() == [100, 140]
    for limit in (99, 100, 110):
        choice = choose_layout(costs, 2, virtual_stages=2, stage_memory_limit=limit)
        fits = held(np.array([choice.layout.boundaries]))[0] <= limit
        assert fits or choice.layout == choice.min_max

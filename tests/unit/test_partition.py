"""partition is exact: never above the optimum of an exhaustive search, ties as promised."""

import math
import random
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynmo.balancers import partition
from megatron_dynmo.errors import BalanceError


def every_split(num_layers, num_stages, min_layers):
    for inner in combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        bounds = [0, *inner, num_layers]
        if all(b - a >= min_layers for a, b in pairwise(bounds)):
            yield bounds


def stage_sums(values, bounds, first=0.0, last=0.0):
    exact = [Fraction(v) for v in values]
    sums = [sum(exact[a:b], Fraction(0)) for a, b in pairwise(bounds)]
    sums[0] += Fraction(first)
    sums[-1] += Fraction(last)
    return sums


def peak_time(bounds, costs, first_stage_extra=0.0, last_stage_extra=0.0, stage_speeds=None, **_):
    sums = stage_sums(costs, bounds, first_stage_extra, last_stage_extra)
    speeds = stage_speeds or [1] * len(sums)
    return max(s / Fraction(v) for s, v in zip(sums, speeds, strict=True))


def stage_memory(bounds, layer_memory=None, layer_activation_memory=None, num_microbatches=None,
                 first_stage_memory=0, last_stage_memory=0, **_):  # fmt: skip
    num_stages, num_layers = len(bounds) - 1, bounds[-1]
    static = stage_sums(
        layer_memory or [0] * num_layers, bounds, first_stage_memory, last_stage_memory
    )
    active = stage_sums(layer_activation_memory or [0] * num_layers, bounds)
    in_flight = num_microbatches or num_stages
    return [m + a * min(in_flight, num_stages - s)
            for s, (m, a) in enumerate(zip(static, active, strict=True))]  # fmt: skip


def fits(bounds, stage_memory_limit=None, **options):
    if stage_memory_limit is None:
        return True
    used = stage_memory(bounds, **options)
    allowed = stage_memory_limit
    allowed = allowed if isinstance(allowed, list) else [allowed] * len(used)
    return all(u <= Fraction(a) for u, a in zip(used, allowed, strict=True))


def moved(bounds, current, layer_bytes=None, **_):
    weights = layer_bytes or [1] * bounds[-1]
    owner = {n: s for s, (a, b) in enumerate(pairwise(bounds)) for n in range(a, b)}
    before = {n: s for s, (a, b) in enumerate(pairwise(current)) for n in range(a, b)}
    return sum(Fraction(w) for n, w in enumerate(weights) if owner[n] != before[n])


def prefix_of(values):
    """Exact prefix sums; whole numbers where the values are, which keeps the search quick."""
    sums = [0]
    for value in values:
        exact = Fraction(value)
        sums.append(sums[-1] + (exact.numerator if exact.denominator == 1 else exact))
    return sums


def check(costs, num_stages, **options):
    """Compare with exhaustive search in exact arithmetic; returns whether a split exists."""
    splits = list(every_split(len(costs), num_stages, options.get("min_layers", 1)))
    if options.get("stage_memory_limit") is not None:
        splits = [bounds for bounds in splits if fits(bounds, **options)]
    if not splits:
        with pytest.raises(BalanceError):
            partition(costs, num_stages, **options)
        return False
    got = partition(costs, num_stages, **options)
    assert got in splits
    prefix = prefix_of(costs)
    extras = [0] * num_stages
    extras[0] += Fraction(options.get("first_stage_extra", 0))
    extras[-1] += Fraction(options.get("last_stage_extra", 0))
    slowness = [1 / Fraction(v) for v in options.get("stage_speeds") or [1] * num_stages]

    def time(bounds):
        return max(
            (prefix[b] - prefix[a] + extra) * slow
            for (a, b), extra, slow in zip(pairwise(bounds), extras, slowness, strict=True)
        )

    best = min(map(time, splits))
    assert time(got) == best
    # Then the ties, in their order.
    tied = [bounds for bounds in splits if time(bounds) == best]
    if options.get("current") is not None:
        fewest = min(moved(bounds, **options) for bounds in tied)
        assert moved(got, **options) == fewest
        tied = [bounds for bounds in tied if moved(bounds, **options) == fewest]
    if options.get("layer_memory") or options.get("layer_activation_memory"):
        least = min(max(stage_memory(bounds, **options)) for bounds in tied)
        assert max(stage_memory(got, **options)) == least
    return True


# ---------------------------------------------------------------- properties 2,400 here, 500 below

ties = st.integers(0, 6).map(float)
measured = st.floats(0, 100, allow_nan=False, allow_subnormal=False)
costs_of_all_kinds = st.one_of(
    st.lists(ties, min_size=1, max_size=7),
    st.lists(measured, min_size=1, max_size=7),
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.7]), min_size=1, max_size=7),
    st.lists(st.just(0.0), min_size=1, max_size=7),
    st.lists(st.sampled_from([0.0, 1.0, 1e9]), min_size=1, max_size=7),
)


@settings(max_examples=600, deadline=None)
@given(costs=costs_of_all_kinds, num_stages=st.integers(1, 4), data=st.data())
def test_time_alone(costs, num_stages, data):
    check(
        costs,
        num_stages,
        min_layers=data.draw(st.integers(0, 2)),
        first_stage_extra=data.draw(st.one_of(ties, measured)),
        last_stage_extra=data.draw(st.one_of(ties, measured)),
    )


@settings(max_examples=500, deadline=None)
@given(costs=costs_of_all_kinds, num_stages=st.integers(1, 4), data=st.data())
def test_stages_of_unequal_speed(costs, num_stages, data):
    speed = st.sampled_from([1.0, 1.0, 0.5, 0.8, 2.0, 0.01])
    check(
        costs,
        num_stages,
        min_layers=data.draw(st.integers(0, 3)),
        last_stage_extra=data.draw(ties),
        stage_speeds=data.draw(st.lists(speed, min_size=num_stages, max_size=num_stages)),
    )


@settings(max_examples=700, deadline=None)
@given(costs=costs_of_all_kinds, num_stages=st.integers(1, 4), data=st.data())
def test_memory_limits_that_fit_and_that_do_not(costs, num_stages, data):
    per_layer = st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs))
    per_stage = st.lists(st.integers(1, 60), min_size=num_stages, max_size=num_stages)
    check(
        costs,
        num_stages,
        min_layers=data.draw(st.integers(0, 2)),
        first_stage_extra=data.draw(ties),
        stage_speeds=data.draw(
            st.none() | st.lists(st.sampled_from([1.0, 0.5]), min_size=num_stages,
                                 max_size=num_stages)
        ),
        layer_memory=data.draw(per_layer),
        layer_activation_memory=data.draw(st.none() | per_layer),
        num_microbatches=data.draw(st.none() | st.integers(1, 5)),
        stage_memory_limit=data.draw(st.none() | st.integers(1, 60) | per_stage),
        first_stage_memory=data.draw(st.integers(0, 5)),
        last_stage_memory=data.draw(st.integers(0, 5)),
    )  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(costs=costs_of_all_kinds, num_stages=st.integers(1, 4), data=st.data())
def test_ties_go_to_the_fewest_bytes_moved_then_to_less_memory(costs, num_stages, data):
    per_layer = st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs))
    inner = st.lists(
        st.integers(0, len(costs)), min_size=num_stages - 1, max_size=num_stages - 1
    ).map(sorted)
    check(
        costs,
        num_stages,
        min_layers=data.draw(st.integers(0, 1)),
        last_stage_extra=data.draw(ties),
        current=[0, *data.draw(inner), len(costs)],
        layer_bytes=data.draw(st.none() | per_layer),
        layer_memory=data.draw(st.none() | per_layer),
        stage_speeds=data.draw(
            st.none() | st.lists(st.sampled_from([1.0, 0.5]), min_size=num_stages,
                                 max_size=num_stages)
        ),
    )  # fmt: skip


def adversarial_cases():
    cases = []
    giant = 1e6
    for n in range(1, 8):
        cases.append([0.0] * n)
        cases.append([1.0] * n)
        cases.append([0.1] * n)
        for where in {0, n // 2, n - 1}:
            row = [1.0] * n
            row[where] = giant
            cases.append(row)
            cases.append([0.0 if i != where else giant for i in range(n)])
        cases.append([float(i) for i in range(n)])
        cases.append([float(n - i) for i in range(n)])
        cases.append([float(2**i) for i in range(n)])
        cases.append([1.0 + 2.0**-52 * (i % 3) for i in range(n)])  # differ in the last bit only
    return cases


@pytest.mark.parametrize("costs", adversarial_cases(), ids=str)
def test_adversarial_costs(costs):
    for num_stages in (1, 2, 3, 5):
        check(costs, num_stages, min_layers=0)
        check(costs, num_stages, min_layers=1)
        check(costs, num_stages, min_layers=0, last_stage_extra=1.0, first_stage_extra=0.25)


def test_a_stage_too_slow_for_a_heavy_layer_steps_aside():
    """Filling stages greedily would leave the slow stage in front of a layer it cannot take."""
    costs, speeds = [1.0, 1.0, 9.0, 1.0], [1.0, 0.2, 1.0]
    check(costs, 3, stage_speeds=speeds)
    assert partition(costs, 3, stage_speeds=speeds) == [0, 1, 2, 4]


def test_two_layers_each_need_the_heavy_pair_split():
    assert partition([1, 1, 1, 5, 5, 1], 3, min_layers=2) == [0, 2, 4, 6]


def test_difference_in_the_last_bit_is_seen():
    eps = 2.0**-52
    assert partition([1.0, 1.0, 1.0 + eps, 1.0, 1.0], 2) in ([0, 2, 5], [0, 3, 5])
    best = partition([1.0 + eps, 1.0, 1.0, 1.0], 3, current=[0, 2, 3, 4])
    assert peak_time(best, [1.0 + eps, 1.0, 1.0, 1.0]) == 2


# ---------------------------------------------------------------- examples


def test_one_dominating_layer():
    assert partition([10, 1, 1, 1], 2) == [0, 1, 4]
    assert partition([1, 1, 1, 10], 2) == [0, 3, 4]


def test_more_stages_than_layers():
    bounds = partition([3.0, 2.0], 5, min_layers=0)
    assert peak_time(bounds, [3.0, 2.0]) == 3
    assert len(bounds) == 6


def test_42_equal_layers_leave_no_stage_empty():
    sizes = [b - a for a, b in pairwise(partition([3.0] * 42, 16))]
    assert sorted(sizes) == [2] * 6 + [3] * 10


def test_arrays_and_integers_are_taken_as_they_are():
    assert partition(np.array([10, 1, 1, 1]), 2) == [0, 1, 4]
    assert partition(np.array([10.0, 1, 1, 1], dtype=np.float32), np.int64(2)) == [0, 1, 4]
    huge = [2**80 + 1, 2**80, 2**80]
    assert partition(huge, 2, last_stage_extra=1) in ([0, 1, 3], [0, 2, 3])


def test_the_layout_in_force_wins_a_tie():
    assert partition([1.0] * 5, 2, current=[0, 3, 5]) == [0, 3, 5]
    assert partition([1.0] * 5, 2, current=[0, 2, 5]) == [0, 2, 5]
    # Both cuts are optimal; layer 3 is heavy to move.
    assert partition([2, 2, 1, 2, 2], 2, current=[0, 5, 5], layer_bytes=[1, 1, 9, 1, 1]) == [
        0,
        3,
        5,
    ]


def test_memory_of_deep_stages_counts_micro_batches_in_flight():
    # Every layer keeps 10 bytes for each micro-batch: 4, 3, 2, 1 in flight on the four stages.
    costs, options = [1.0] * 8, {"layer_memory": [0.0] * 8, "layer_activation_memory": [10.0] * 8}
    deep = partition(costs, 4, **options, stage_memory_limit=60)
    assert deep == [0, 1, 3, 6, 8]
    assert stage_memory(deep, **options) == [40, 60, 60, 20]
    assert partition(costs, 4, **options, stage_memory_limit=60, num_microbatches=2) == [
        0, 2, 4, 6, 8]  # fmt: skip


# Units of the public model cards: first-stage and last-stage extra, optimum of the largest stage.
CARDS = [
    ("DeepSeek-V3", [0.6] * 3 + [1.0] * 58, 0.1, 1.4, 16, "4.0"),
    ("DeepSeek-V3", [0.6] * 3 + [1.0] * 58, 0.1, 1.4, 4, "15.9"),
    ("GLM-4.5", [0.6] * 3 + [1.0] * 89, 0.1, 1.2, 8, "12.0"),
    ("GLM-4.5-Air", [0.6] + [1.0] * 45, 0.1, 1.2, 4, "12.0"),
    ("Llama-3-70B", [1.0] * 80, 0.1, 1.0, 8, "11.0"),
    ("gpt-oss-120b", [1.0, 0.7] * 18, 0.1, 2.0, 4, None),
]


@pytest.mark.parametrize(("card", "units", "first", "last", "num_stages", "optimum"), CARDS)
def test_model_cards(card, units, first, last, num_stages, optimum):
    # Forward u and backward 2u; in decimal units the optimum is exact.
    decimal = [Fraction(str(u)) * 3 for u in units]
    first3, last3 = Fraction(str(first)) * 3, Fraction(str(last)) * 3
    bounds = partition(decimal, num_stages, first_stage_extra=first3, last_stage_extra=last3)
    worst = peak_time(bounds, decimal, first3, last3) / 3
    assert (bounds[0], bounds[-1]) == (0, len(units))
    assert worst == optimum_by_dynamic_programming(decimal, num_stages, first3, last3) / 3
    if optimum is not None:
        assert worst == Fraction(optimum)
    floats = partition(units, num_stages, first_stage_extra=first, last_stage_extra=last)
    assert float(peak_time(floats, units, first, last)) == pytest.approx(float(worst), rel=1e-15)


def optimum_by_dynamic_programming(costs, num_stages, first, last):
    prefix = [Fraction(0)]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best = [p + first for p in prefix]
    best[0] = math.inf  # each stage has a layer
    for stage in range(1, num_stages):
        extra = last if stage == num_stages - 1 else 0
        best = [min((max(best[i], prefix[j] - prefix[i] + extra) for i in range(j)),
                    default=math.inf) for j in range(len(prefix))]  # fmt: skip
    return best[-1]


def test_known_layout_that_is_already_optimal_stays():
    units = [1.0] * 80
    current = list(range(0, 81, 10))
    assert partition(units, 8, first_stage_extra=0.1, last_stage_extra=1.0, current=current) == (
        current
    )


def test_78_layers_measured_with_a_heavy_output_stage():
    """19.1 / 25.6 / 25.6 / 29.7 % of the work on 4 stages becomes equal to within a layer."""
    layer = 25.6 / 20  # middle stages of 20 layers
    current = [0, 15, 35, 55, 78]
    first, last = 19.1 - 15 * layer, 29.7 - 23 * layer
    first, last = max(first, 0.0), max(last, 0.0)
    costs = [layer] * 78
    before = peak_time(current, costs, first, last)
    bounds = partition(costs, 4, first_stage_extra=first, last_stage_extra=last, current=current)
    sums = stage_sums(costs, bounds, first, last)
    assert max(sums) < before
    assert max(sums) - sum(sums) / 4 < Fraction(layer)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            ([1, 1], 3),
            {},
            r"2 layers cannot give each of 3 stages at least 1; use at most 2 stages",
        ),
        (([1, 1], 0), {}, "0 stages"),
        (([1, 1], 2), {"min_layers": -1}, "min_layers is -1"),
        (([1, -1], 2), {}, r"layer_costs\[1\] is -1"),
        (([1, math.nan], 2), {}, r"layer_costs\[1\] is nan"),
        (([1, math.inf], 2), {}, r"layer_costs\[1\] is inf"),
        (([1, 1], 2), {"stage_speeds": [1.0, 0.0]}, r"stage_speeds\[1\] is 0"),
        (([1, 1], 2), {"stage_speeds": [1.0]}, "stage_speeds has 1 numbers, 2 are needed"),
        (([1, 1], 2), {"last_stage_extra": -1.0}, r"last_stage_extra is -1"),
        (([1, 1], 2), {"layer_memory": [1]}, "layer_memory has 1 numbers"),
        (([1, 1], 2), {"stage_memory_limit": 5}, "stage_memory_limit is set without layer_memory"),
        (([1, 1], 2), {"layer_memory": [1, 1], "stage_memory_limit": [5, 0]}, r"limit\[1\] is 0"),
        (([1, 1], 2), {"current": [0, 2]}, "current boundaries .* 3 ascending numbers from 0 to 2"),
        (([1, 1], 2), {"current": [0, 2, 1]}, "current boundaries"),
        (([1, 1], 2), {"current": [0, 1, 2], "layer_bytes": [1]}, "layer_bytes has 1 numbers"),
    ],
)
def test_bad_input_names_the_number(arguments, options, message):
    with pytest.raises(BalanceError, match=message):
        partition(*arguments, **options)


def test_infeasible_memory_names_the_stage_the_bytes_and_what_would_fit():
    memory = [4000.0, 3000.0, 9000.0, 1000.0]
    with pytest.raises(BalanceError) as caught:
        partition([1.0] * 4, 2, layer_memory=memory, stage_memory_limit=8000)
    text = str(caught.value)
    assert "stage 1 needs 10,000 bytes for layers 3 to 4, allowed are 8,000" in text
    assert "10,000 bytes on every stage would fit" in text
    assert partition([1.0] * 4, 2, layer_memory=memory, stage_memory_limit=10000) == [0, 2, 4]


def test_infeasible_memory_with_unequal_limits():
    with pytest.raises(BalanceError, match=r"stage 0 needs 6 bytes for layer 1, allowed are 5"):
        partition([1.0] * 2, 2, layer_memory=[6, 6], stage_memory_limit=[5, 100], min_layers=1)
    assert partition([1.0] * 2, 2, layer_memory=[6, 6], stage_memory_limit=[5, 100],
                     min_layers=0) == [0, 0, 2]  # fmt: skip


# ---------------------------------------------------------------- size


@pytest.mark.parametrize(("num_layers", "num_stages"), [(128, 64), (2000, 150)])
def test_large_cases_are_optimal(num_layers, num_stages):
    """No split has every stage strictly below the one found: one greedy sweep proves it."""
    rng = random.Random(num_layers)
    costs = [rng.uniform(0.5, 2.0) for _ in range(num_layers)]
    worst = peak_time(partition(costs, num_stages), costs)
    stages, load = 1, Fraction(0)
    for cost in map(Fraction, costs):
        if load + cost >= worst:
            stages, load = stages + 1, Fraction(0)
        load += cost
    assert stages > num_stages


def test_wide_open_places_still_keep_most():
    """One giant layer leaves every other boundary free: nothing else needs to move."""
    costs = [1.0] * 300
    costs[150] = 1e6
    current = list(range(0, 301, 10))
    bounds = partition(costs, 30, current=current)
    assert peak_time(bounds, costs) == 10**6
    alone = [a for a, b in pairwise(bounds) if a == 150 and b == 151]
    assert len(alone) == 1
    assert moved(bounds, current) == 9

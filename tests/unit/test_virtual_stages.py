"""Virtual stages: the search against exhaustive search, and the bound that it proves."""

import random
from itertools import combinations_with_replacement, pairwise

import pytest

from megatron_dynmo.balancers import partition, partition_virtual
from megatron_dynmo.errors import BalanceError


def rank_sums(values, bounds, num_stages, first=0, last=0):
    sums = [0] * num_stages
    for chunk, (a, b) in enumerate(pairwise(bounds)):
        sums[chunk % num_stages] += sum(values[a:b])
    sums[0] += first
    sums[-1] += last
    return sums


def exhaustive(costs, num_stages, num_chunks, min_layers, first, last, speeds):
    best = None
    for inner in combinations_with_replacement(range(len(costs) + 1), num_chunks - 1):
        bounds = [0, *inner, len(costs)]
        if any(b - a < min_layers for a, b in pairwise(bounds)):
            continue
        sums = rank_sums(costs, bounds, num_stages, first, last)
        peak = max(s / v for s, v in zip(sums, speeds, strict=True))
        best = peak if best is None else min(best, peak)
    return best


def test_small_cases_against_exhaustive_search(record_property):
    rng, found = random.Random(7), 0
    cases = 200
    for _ in range(cases):
        num_stages = rng.choice((2, 2, 3))
        num_layers, min_layers = rng.randint(2 * num_stages, 9), rng.choice((0, 1))
        costs = [rng.randint(0, 9) for _ in range(num_layers)]
        first, last = rng.randint(0, 4), rng.randint(0, 8)
        speeds = rng.choice(([1] * num_stages, [2, *[1] * (num_stages - 1)]))
        result = partition_virtual(
            costs, num_stages, 2, first_stage_extra=first, last_stage_extra=last,
            stage_speeds=speeds, min_layers=min_layers,
        )  # fmt: skip
        best = exhaustive(costs, num_stages, 2 * num_stages, min_layers, first, last, speeds)
        sums = rank_sums(costs, result.boundaries, num_stages, first, last)
        assert result.peak == max(s / v for s, v in zip(sums, speeds, strict=True))
        assert all(b - a >= min_layers for a, b in pairwise(result.boundaries))
        assert result.lower_bound <= best <= result.peak
        assert result.optimal == (result.lower_bound == result.peak)
        assert result.gap >= result.peak / best - 1 if best else result.gap == 0
        found += result.peak == best
    record_property("optimal share", found / cases)
    assert found / cases > 0.97


def test_case_04_all_80_layers_equally():
    result = partition_virtual([1.0] * 80, 16, 2)
    assert rank_sums([1] * 80, result.boundaries, 16) == [5] * 16
    assert {b - a for a, b in pairwise(result.boundaries)} <= {2, 3}
    assert (result.gap, result.optimal) == (0.0, True)


def test_case_12_uniform_cannot_be_beaten_in_units():
    """80 layers of 1, embedding 0.1, output 1.0, on 8 ranks of 5 chunks: 11 is the least."""
    result = partition_virtual([10] * 80, 8, 5, first_stage_extra=1, last_stage_extra=10)
    assert (result.peak, result.lower_bound, result.optimal) == (110.0, 110.0, True)


def test_granularity_bound_proves_what_the_mean_cannot():
    result = partition_virtual([3] * 10, 4, 2)
    assert result.lower_bound == 9.0  # the mean is 7.5, but layers weigh 3
    assert result.optimal


def test_virtual_stages_beat_one_chunk_a_rank():
    costs = [4, 7, 4, 1]
    assert max(rank_sums(costs, partition(costs, 2), 2)) == 11
    result = partition_virtual(costs, 2, 2)
    assert (result.boundaries, result.peak, result.optimal) == ([0, 1, 2, 3, 4], 8.0, True)


def test_one_virtual_stage_is_the_exact_partition():
    costs = [4.0, 1.0, 2.0, 7.0, 1.0, 1.0]
    result = partition_virtual(costs, 3, 1, last_stage_extra=1.0)
    assert result.boundaries == partition(costs, 3, last_stage_extra=1.0)
    assert (result.gap, result.optimal) == (0.0, True)


def test_the_layout_in_force_stays_unless_another_is_better():
    current = [0, 1, 3, 5, 6]
    assert partition_virtual([1] * 6, 2, 2, current=current).boundaries == current
    worse = [0, 3, 4, 5, 6]
    assert partition_virtual([1] * 6, 2, 2, current=worse).peak == 3


def test_memory_limit_of_ranks():
    costs, memory = [1] * 8, [4, 4, 1, 1, 1, 1, 1, 1]
    free = partition_virtual(costs, 2, 2)
    assert free.peak == 4
    tight = partition_virtual(costs, 2, 2, layer_memory=memory, stage_memory_limit=8)
    assert max(rank_sums(memory, tight.boundaries, 2)) <= 8
    with pytest.raises(BalanceError, match=r"rank \d needs 7 bytes, allowed are 6; allow 7"):
        partition_virtual(costs, 2, 2, layer_memory=memory, stage_memory_limit=6)


def test_same_answer_every_time():
    rng = random.Random(1)
    costs = [rng.uniform(1, 2) for _ in range(61)]
    assert partition_virtual(costs, 8, 2) == partition_virtual(costs, 8, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_layers": 2}, "5 layers cannot give each of 4 stages at least 2"),
        ({"layer_memory": [1] * 5}, "only work together"),
        ({"current": [0, 5]}, r"current boundaries \[0, 5\]"),
        ({"stage_speeds": [1, 0]}, r"stage_speeds\[1\] is 0"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(BalanceError, match=message):
        partition_virtual([1] * 5, 2, 2, **options)

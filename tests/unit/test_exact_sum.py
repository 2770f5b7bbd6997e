"""Exact sums: equal to math.fsum for every order and every split over ranks."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynmo.exact_sum import NUM_LIMBS, limbs, to_float

NUMBERS = st.lists(st.floats(min_value=0.0, allow_nan=False, allow_infinity=False), max_size=60)


def reference(values):
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


@given(NUMBERS, st.randoms(use_true_random=False), st.integers(1, 9))
def test_any_order_and_any_split_over_ranks_gives_the_rounded_exact_sum(values, rng, num_ranks):
    shuffled = rng.sample(values, len(values))
    ranks = [[] for _ in range(num_ranks)]
    for value in shuffled:
        rng.choice(ranks).append(value)
    total = sum((limbs(rank) for rank in ranks), np.zeros(NUM_LIMBS, dtype=np.int64))
    assert to_float(total).hex() == reference(values).hex()


@given(NUMBERS)
def test_the_limbs_themselves_do_not_depend_on_the_order(values):
    assert (limbs(values) == limbs(values[::-1])).all()


def test_wide_range_where_plain_addition_loses_terms():
    values = [2.0**1000, 1.0, 2.0**-1074, 2.0**52, 2.0**-30] * 7
    assert sum(values) == sum(reversed(values)) == 7 * 2.0**1000
    assert to_float(limbs(values)).hex() == math.fsum(values).hex()
    # What was lost is still there: the difference of the limbs is the small terms, exactly.
    assert (
        to_float(limbs(values) - limbs([2.0**1000] * 7)).hex()
        == math.fsum([1.0 * 7, 2.0**-1074 * 7, 2.0**52 * 7, 2.0**-30 * 7]).hex()
    )


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([], 0.0),
        ([-0.0], 0.0),
        ([5e-324], 5e-324),
        ([5e-324] * 3, 1.5e-323),
        ([2.2250738585072014e-308, 5e-324], 2.225073858507202e-308),
        ([1.0, 2.0**-53], 1.0),  # half way: to even
        ([1.0, 2.0**-53, 5e-324], 1.0000000000000002),  # just above half way
        ([1.7976931348623157e308], 1.7976931348623157e308),
        ([1.7976931348623157e308] * 2, math.inf),
        ([math.inf, 1.0], math.inf),
    ],
)
def test_edges(values, wanted):
    assert to_float(limbs(values)).hex() == wanted.hex()


def test_not_a_number_wins_over_infinity():
    assert math.isnan(to_float(limbs([math.inf, math.nan]) + limbs([1.0])))


def test_many_large_terms_leave_head_room_for_a_million_ranks():
    one = limbs(np.full(100_000, np.finfo(np.float64).max))
    total = one * ((1 << 20) - 1)
    assert (total >= 0).all()
    assert to_float(total) == math.inf
    ordinary = limbs(np.full(100_000, 0.1))
    exact = math.fsum([0.1] * 100_000)
    assert to_float(ordinary).hex() == exact.hex()
    assert (one[:65] < 1 << 32).all() and one[65] < 1 << 43


def test_many_random_terms():
    rng = random.Random(7)
    values = [rng.random() * 2.0 ** rng.randrange(-300, 300) for _ in range(200_000)]
    assert to_float(limbs(values)).hex() == math.fsum(values).hex()


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match=r"-1\.5"):
        limbs([1.0, -1.5])

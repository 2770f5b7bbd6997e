from fractions import Fraction

import pytest

from megatron_dynmo.dynamics.pruning.schedule import CubicSchedule
from megatron_dynmo.errors import ConfigError


def test_last_step_reaches_the_final_sparsity_itself():
    # 3000..7000 of 10,000 every 1000: the schedule that ended at 88.6 % where 90 % was meant.
    schedule = CubicSchedule(begin=3000, end=7000, every=1000, final=Fraction("0.9"))
    assert schedule.sparsity(7000) == schedule.sparsity(10_000) == Fraction(9, 10)
    assert float(schedule.sparsity(6000)) == pytest.approx(0.8859375)
    assert schedule.sparsity(2999) == 0
    assert schedule.sparsity(3999) == schedule.sparsity(3000) == 0


def test_steps_grow_and_stay_between():
    schedule = CubicSchedule(
        begin=3, end=20, every=4, final=Fraction("0.5"), initial=Fraction(1, 8)
    )
    values = [schedule.sparsity(iteration) for iteration in range(1, 30)]
    assert values == sorted(values)
    assert [i for i in range(2, 30) if schedule.sparsity(i) != schedule.sparsity(i - 1)] == [
        3,
        7,
        11,
        15,
        19,
        20,  # 17 is no multiple of 4: the last step is taken nevertheless
    ]
    assert schedule.sparsity(7) == Fraction(1, 2) - Fraction(3, 8) * (1 - Fraction(4, 17)) ** 3


def test_one_step_at_once():
    schedule = CubicSchedule(begin=3, end=3, every=1, final=Fraction("0.5"))
    assert (schedule.sparsity(2), schedule.sparsity(3)) == (0, Fraction(1, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"begin": 0},
        {"begin": 11},
        {"every": 0},
        {"final": Fraction(1)},
        {"final": Fraction(0)},
        {"initial": Fraction(3, 4)},
    ],
)
def test_mistakes_are_named(wrong):
    right = {"begin": 1, "end": 10, "every": 2, "final": Fraction(1, 2)}
    with pytest.raises(ConfigError, match="give"):
        CubicSchedule(**{**right, **wrong})

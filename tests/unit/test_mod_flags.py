"""The capacity of Mixture of Depths over the iterations."""

import pytest

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.mixture_of_depths import CapacitySchedule


def test_one_number_holds_for_the_whole_run():
    schedule = CapacitySchedule.parse("0.125")
    assert schedule.at(0) == schedule.at(1) == schedule.at(10**6) == 0.125


def test_each_step_holds_until_the_next():
    schedule = CapacitySchedule.parse("1:1.0; 100:0.5;200:0.125;")
    assert [schedule.at(i) for i in (1, 99, 100, 199, 200, 999)] == [1, 1, 0.5, 0.5, 0.125, 0.125]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "from iteration 1 on"),
        ("0", "share above 0"),
        ("1.5", "'1:1.5' is neither"),
        ("nan", "neither"),
        ("1:1;x:0.5", "'x:0.5' is neither"),
        ("2:0.5", "from iteration 1 on"),
        ("1:1;9:0.5;9:0.25", "9 follows 9"),
    ],
)
def test_mistakes_are_named(text, said):
    with pytest.raises(ConfigError, match=said):
        CapacitySchedule.parse(text)

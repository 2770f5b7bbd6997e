"""What `--dynmo-freeze...` takes and refuses."""

import pytest

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.freezing import parse_freeze_schedule


def test_a_schedule_is_read_as_pairs():
    assert parse_freeze_schedule(" 2:1; 10:4;30:0 ") == ((2, 1), (10, 4), (30, 0))
    assert parse_freeze_schedule("") == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("4", "'4' is not ITER:LAST_LAYER"),
        ("4:a", "not ITER:LAST_LAYER"),
        ("0:1", "not ITER:LAST_LAYER"),
        ("²:1", "not ITER:LAST_LAYER"),
        ("4:1;4:2", "iterations must increase, but 4 follows 4"),
    ],
)
def test_a_wrong_schedule_is_refused_by_its_piece(text, why):
    with pytest.raises(ConfigError, match=why):
        DynMoConfig(freeze="schedule", freeze_schedule=text)


def test_flags_without_effect_are_refused():
    with pytest.raises(ConfigError, match="needs --dynmo-freeze-schedule"):
        DynMoConfig(freeze="schedule")
    with pytest.raises(
        ConfigError, match="no effect with --dynmo-freeze egeria, only with schedule"
    ):
        DynMoConfig(freeze="egeria", freeze_schedule="2:1")
    with pytest.raises(ConfigError, match="freeze-schedule: no effect without --dynmo-freeze;"):
        DynMoConfig(freeze_schedule="2:1")
    with pytest.raises(ConfigError, match="freeze-window: no effect with --dynmo-freeze autofr"):
        DynMoConfig(freeze="autofreeze", freeze_window=5)
    with pytest.raises(ConfigError, match="a slope needs 2 evaluations"):
        DynMoConfig(freeze="egeria", freeze_window=1)
    with pytest.raises(ConfigError, match="off leaves Megatron unpatched, so there is no freezing"):
        DynMoConfig(freeze="autofreeze", mode="off")


def test_freezing_is_a_dynamic_only_where_asked_for():
    assert DynMoConfig().dynamics == ()
    assert DynMoConfig(freeze="autofreeze").dynamics == ("freezing",)


@pytest.mark.parametrize(
    ("flags", "thaws"),
    [
        ({"freeze": "schedule", "freeze_schedule": "2:1;4:3"}, False),
        ({"freeze": "schedule", "freeze_schedule": "2:3;4:1"}, True),
        ({"freeze": "autofreeze"}, False),
        ({"freeze": "egeria"}, True),
        ({"freeze": "egeria", "freeze_thaw_ratio": 0.0}, False),
    ],
)
def test_it_is_known_beforehand_whether_layers_thaw(flags, thaws):
    assert DynMoConfig(**flags).thaws == thaws

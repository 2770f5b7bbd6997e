"""Lists of pieces by iteration read alike, whichever flag they belong to."""

import pytest

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.pieces import pieces


def test_blanks_and_empty_pieces_do_not_count():
    assert pieces(" 3:a ;; 5:b;") == ["3:a", "5:b"]
    assert pieces(" ; ") == []


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--dynmo-force-layout", {"force_layout": "5:E|tL;5:Et|L"}),
        ("--dynmo-force-pack", {"force_pack": "5:3;5:2"}),
        ("--dynmo-freeze-schedule", {"freeze": "schedule", "freeze_schedule": "5:1;5:2"}),
        (
            "--dynmo-early-exit-threshold",
            {"early_exit": "confidence", "early_exit_threshold": "5:0.9;5:0.8"},
        ),
        ("--dynmo-mod-capacity", {"mod": True, "mod_capacity": "1:1.0;5:0.5;5:0.25"}),
    ],
)
def test_iterations_that_do_not_increase_are_named_with_their_flag(flag, settings):
    with pytest.raises(ConfigError, match=f"{flag}: iterations must increase, but 5 follows 5"):
        DynMoConfig(**settings)

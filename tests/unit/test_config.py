"""Every `--dynmo-*` flag: its default, its values, its mistakes; and how they are read."""

import argparse
import dataclasses

import pytest

from megatron_dynmo.config import (
    FLAG_GROUPS,
    DynMoConfig,
    ForcedMove,
    flag_names,
    parse_forced_moves,
    unknown_flag_message,
)
from megatron_dynmo.errors import ConfigError

DEFAULTS = {
    "mode": "balance",
    "device": "auto",
    "balancer": "partition",
    "weight": "time",
    "interval": None,
    "window": 3,
    "cooldown": None,
    "min_gain_pct": 2.0,
    "memory_cap_gb": None,
    "force_layout": "",
    "overlap_moves": False,
    "log_dir": None,
    "digest_interval": 0,
    "layer_rng": False,
    "emulate": None,
}

# flag, text, value
GOOD = [
    ("mode", "off", "off"),
    ("mode", "observe", "observe"),
    ("device", "cuda", "cuda"),
    ("device", "cpu", "cpu"),
    ("balancer", "diffusion", "diffusion"),
    ("weight", "params", "params"),
    ("weight", "memory", "memory"),
    ("interval", "7", 7),
    ("interval", "auto", None),
    ("window", "1", 1),
    ("cooldown", "12", 12),
    ("cooldown", "auto", None),
    ("min_gain_pct", "0", 0.0),
    ("min_gain_pct", "2.5", 2.5),
    ("memory_cap_gb", "79.5", 79.5),
    ("force_layout", "3:Et|tL", "3:Et|tL"),
    ("log_dir", "a/folder", "a/folder"),
    ("digest_interval", "0", 0),
    ("digest_interval", "5", 5),
]

# flag, text, what the message must name
BAD = [
    ("mode", "on", "observe"),
    ("device", "tpu", "cuda"),
    ("balancer", "greedy", "diffusion"),
    ("weight", "flops", "params"),
    ("interval", "0", "at least 1, got 0"),
    ("interval", "often", "must be a whole number, got 'often'"),
    ("window", "0", "at least 1, got 0"),
    ("window", "2.5", "must be a whole number, got '2.5'"),
    ("cooldown", "-1", "at least 1, got -1"),
    ("min_gain_pct", "-1", "percentage >= 0, got -1"),
    ("min_gain_pct", "little", "must be a number, got 'little'"),
    ("min_gain_pct", "nan", "percentage >= 0, got nan"),
    ("min_gain_pct", "inf", "percentage >= 0, got inf"),
    ("memory_cap_gb", "0", "positive number of GB, got 0"),
    ("memory_cap_gb", "-3", "positive number of GB, got -3"),
    ("digest_interval", "-1", "at least 0, got -1"),
    ("force_layout", "Et|tL", "is not ITER:LAYOUT"),
    ("force_layout", "²:Et|tL", "is not ITER:LAYOUT"),
    ("force_layout", "x:Et|tL", "'x:Et|tL' is not ITER:LAYOUT"),
    ("force_layout", "3:", "is not ITER:LAYOUT"),
    ("force_layout", "3:Et|tL;3:E|ttL", "3 follows 3"),
    ("force_layout", "5:Et|tL;2:E|ttL", "2 follows 5"),
    ("force_layout", "0:Et|tL", "first possible iteration is 1"),
    ("emulate", "no/such/file.json", "no/such/file.json"),
]


def flag(name: str) -> str:
    return "--dynmo-" + name.replace("_", "-")


def test_the_defaults_need_no_thought():
    of_dynamics = {item.name for group in FLAG_GROUPS for item in dataclasses.fields(group)}
    found = dataclasses.asdict(DynMoConfig())
    assert {name: value for name, value in found.items() if name not in of_dynamics} == DEFAULTS
    assert DynMoConfig().dynamics == ()
    assert DynMoConfig.from_argv([]) == DynMoConfig()
    assert set(flag_names()) == {flag(name) for name in (*DEFAULTS, *of_dynamics)}


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
@pytest.mark.parametrize("spelling", ["two words", "one word"])
def test_good_values(name, text, value, spelling):
    words = [flag(name), text] if spelling == "two words" else [f"{flag(name)}={text}"]
    expected = dataclasses.replace(DynMoConfig(), **{name: value})
    assert DynMoConfig.from_argv(words) == expected
    assert DynMoConfig.from_argv(["--lr", "1", *words, "--tensorboard-dir", "x"]) == expected


@pytest.mark.parametrize(("name", "text", "words"), BAD)
def test_bad_values_name_the_flag_and_the_value(name, text, words):
    with pytest.raises(ConfigError) as error:
        DynMoConfig.from_argv([f"{flag(name)}={text}"])
    assert words in str(error.value)
    assert flag(name) in str(error.value) or name == "emulate"
    assert len(str(error.value).splitlines()) == 1


def test_every_flag_is_tested():
    assert {name for name, _, _ in GOOD} | {"layer_rng", "overlap_moves", "emulate"} == set(
        DEFAULTS
    )


def test_a_switch_takes_no_value():
    assert DynMoConfig.from_argv(["--dynmo-layer-rng"]).layer_rng is True
    with pytest.raises(ConfigError, match="layer-rng"):
        DynMoConfig.from_argv(["--dynmo-layer-rng=yes"])
    assert DynMoConfig.from_argv(["--dynmo-overlap-moves"]).overlap_moves is True
    with pytest.raises(ConfigError, match="expected one argument"):
        DynMoConfig.from_argv(["--dynmo-window"])


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_moves_that_are_not_made_do_not_overlap(mode):
    with pytest.raises(ConfigError, match=f"overlap-moves has no effect with --dynmo-mode {mode}"):
        DynMoConfig(mode=mode, overlap_moves=True)
    with pytest.raises(ConfigError, match="no effect on emulated devices"):
        DynMoConfig(emulate="devices.json", overlap_moves=True)


def test_of_two_equal_flags_the_last_wins_wherever_they_stand():
    words = ["--dynmo-window", "4", "--lr", "1", "--dynmo-window=5", "--data-path", "a", "b"]
    assert DynMoConfig.from_argv(words).window == 5
    assert DynMoConfig.from_argv([*words, "--dynmo-window", "6"]).window == 6
    before = DynMoConfig.from_argv(["--dynmo-mode", "observe", "--data-path", "a", "b"])
    after = DynMoConfig.from_argv(["--data-path", "a", "b", "--dynmo-mode", "observe"])
    assert before == after


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--dynmo-balance", "--dynmo-balancer"),
        ("--dynmo-modes", "--dynmo-mode"),
        ("--dynmo-min-gain", "--dynmo-min-gain-pct"),
        ("--dynmo-force-layouts=3:EL", "--dynmo-force-layout"),
    ],
)
def test_an_unknown_flag_is_no_prefix_of_a_known_one(word, near):
    with pytest.raises(ConfigError) as error:
        DynMoConfig.from_argv([word, "x"])
    assert str(error.value) == f"unknown flag {word.partition('=')[0]}; did you mean {near}?"


def test_a_flag_like_nothing_known_is_answered_with_all():
    message = unknown_flag_message("--dynmo-zzzzzzzzzzzz")
    assert all(name in message for name in flag_names())


def test_megatrons_parser_reads_the_same(tmp_path):
    parser = DynMoConfig.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--lr", type=float)
    words = ["--dynmo-interval", "4", "--lr", "0.1", "--dynmo-layer-rng", "--dynmo-log-dir", "d"]
    assert DynMoConfig.from_namespace(parser.parse_args(words)) == DynMoConfig.from_argv(words)
    assert DynMoConfig.from_namespace(parser.parse_args([])) == DynMoConfig()


def test_help_says_the_defaults_and_begins_with_the_flags_of_every_run():
    parser = DynMoConfig.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    text = " ".join(parser.format_help().split())
    assert "iterations measured per decision (default: 3)" in text
    assert "off: Megatron unpatched; observe: measure and advise; balance: move layers" in text
    assert text.count("(default: balance)") == 1
    assert "default: None" not in text and "(default: )" not in text
    assert text.index("--dynmo-mode {") < text.index("--dynmo-pack {")


class TestForcedMoves:
    def test_none(self):
        assert DynMoConfig().forced_moves == ()
        assert parse_forced_moves(" ; ;") == ()

    def test_several_with_blanks(self):
        assert parse_forced_moves("3:Et*5|t*3L; 10 : E|t*8L ;") == (
            ForcedMove(3, "Et*5|t*3L"),
            ForcedMove(10, "E|t*8L"),
        )

    @pytest.mark.parametrize("mode", ["off", "observe"])
    def test_a_mode_that_moves_nothing_cannot_be_forced(self, mode):
        with pytest.raises(ConfigError) as error:
            DynMoConfig(mode=mode, force_layout="3:Et|tL")
        assert f"--dynmo-mode {mode}" in str(error.value)
        assert "use --dynmo-mode balance" in str(error.value)


def test_a_log_dir_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match="is a file, give a folder"):
        DynMoConfig(log_dir=str(path))
    assert DynMoConfig(log_dir=str(tmp_path)).log_dir == str(tmp_path)


def test_the_settings_cannot_change_under_way():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DynMoConfig().mode = "off"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mod_capacity": "0.25"}, "--dynmo-mod-capacity: no effect without --dynmo-mod;"),
        (
            {"freeze_keep": 2, "freeze_interval": 5},
            "interval and --dynmo-freeze-keep: no effect without --dynmo-freeze;",
        ),
        ({"prune_final": 0.5}, "--dynmo-prune-final: no effect without --dynmo-prune;"),
        ({"prune": "magnitude", "prune_multiple": 7}, "no effect with --dynmo-prune magnitude"),
        ({"prune": "neuron", "prune_compute": "sparse"}, "only with magnitude"),
        ({"early_exit": "saturation", "early_exit_classes": 7}, "only with confidence"),
        ({"sparse_attention_rounds": 2}, "no effect without --dynmo-sparse-attention;"),
    ],
)
def test_settings_of_a_dynamic_that_is_off_are_a_mistake(settings, message):
    with pytest.raises(ConfigError, match=message):
        DynMoConfig(**settings)

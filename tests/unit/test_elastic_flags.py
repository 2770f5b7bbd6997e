import pytest

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.elastic import ForcedPack, parse_manager


def test_forced_packs_are_read():
    config = DynMoConfig(force_pack="3:2; 6:4")
    assert config.forced_packs == (ForcedPack(3, 2), ForcedPack(6, 4)) and config.packs
    assert not DynMoConfig().packs and DynMoConfig(pack="on").packs


def test_managers_are_argument_vectors():
    assert parse_manager("none") == ("none", ())
    assert parse_manager("slurm") == ("slurm", ())
    assert parse_manager("command:/bin/x --to 'a b'") == ("command", ("/bin/x", "--to", "a b"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"force_pack": "3"}, "not ITER:STAGES"),
        ({"force_pack": "3:1"}, "2 stages are the fewest"),
        ({"force_pack": "3:2;3:4"}, "iterations must increase"),
        ({"force_pack": "3:2", "min_stages": 3}, "--dynmo-min-stages is 3"),
        ({"force_pack": "3:2", "mode": "observe"}, "use --dynmo-mode balance"),
        ({"pack": "on", "mode": "observe"}, "use --dynmo-mode balance"),
        ({"job_manager": "slurm"}, "add --dynmo-release exit"),
        ({"release": "restart"}, "add --dynmo-job-manager slurm or command:PROGRAM"),
        ({"job_manager": "kubernetes", "release": "exit"}, "give none, slurm, or command:PROGRAM"),
        ({"job_manager": "command:", "release": "exit"}, "give none, slurm, or command:PROGRAM"),
        ({"job_manager": "command:a 'b", "release": "exit"}, "No closing quotation"),
    ],
)
def test_mistakes_say_what_to_change(settings, said):
    with pytest.raises(ConfigError, match=said):
        DynMoConfig(**settings)


def test_one_stage_is_no_pipeline():
    with pytest.raises(ConfigError, match="the first and the last stage stay"):
        DynMoConfig.from_argv(["--dynmo-min-stages", "1"])

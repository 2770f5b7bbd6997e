"""Every feature that is refused is a flag of Megatron's, told from the right argument."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments

from megatron_dynmo.adapters.run import MegatronRun
from megatron_dynmo.adapters.support import UNSUPPORTED, refusals
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError


@pytest.fixture(scope="module")
def parser():
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def value_of(action: argparse.Action) -> list[str]:
    """A value that turns the feature on."""
    if action.nargs == 0:
        return []
    if action.choices:
        return [str(next(c for c in reversed(list(action.choices)) if c != action.default))]
    # Two: one weight shard is no more than one tensor-parallel rank has.
    return ["2"]


def test_a_run_with_defaults_is_refused_nothing(parser):
    assert refusals(parser.parse_args([])) == []


@pytest.mark.parametrize("feature", UNSUPPORTED, ids=lambda feature: feature.flag)
def test_the_flag_is_megatrons_and_turns_on_this_refusal_alone(parser, feature):
    (action,) = [a for a in parser._actions if feature.flag in a.option_strings]
    args = parser.parse_args([feature.flag, *value_of(action)])
    assert [found.flag for found in refusals(args)] == [feature.flag]


def test_our_flags_are_none_of_megatrons(parser):
    DynMoConfig.add_arguments(parser)  # argparse refuses a flag given twice
    args = parser.parse_args(["--dynmo-window", "5"])
    assert DynMoConfig.from_namespace(args).window == 5


def test_moves_do_not_overlap_over_nccl():
    run = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="over gloo only, not over NCCL; leave it out"):
        MegatronRun._check_overlap(run, DynMoConfig(overlap_moves=True))
    MegatronRun._check_overlap(run, DynMoConfig())

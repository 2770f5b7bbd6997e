"""Help texts that argparse cannot print are repaired, all others are left as they are."""

import argparse

import pytest

from megatron_dynmo.adapters.help_text import repair_help


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("the top 5% (or less)", "the top 5% (or less)"),
        ("(10%)", "(10%)"),
        ("100%", "100%"),
        ("5%% of all (default: %(default)s)", "5% of all (default: 7)"),
        ("5% of all (default: %(default)s)", "5% of all (default: 7)"),
        ("%d and %s", "%d and %s"),
        ("plain", "plain"),
    ],
)
def test_every_text_prints(text, printed):
    parser = argparse.ArgumentParser()
    parser.add_argument("--flag", default=7, help=text)
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    parser.add_argument("--silent")
    assert repair_help(parser) is parser
    assert printed in " ".join(parser.format_help().split())

"""Make `--help` print: some of Megatron's help texts hold a bare per cent sign.

argparse takes `%` for the start of a format, so one such text ends `--help` in a traceback.
"""

from __future__ import annotations

import argparse
import re

# A per cent sign that starts neither '%%' nor '%(name)s'.
_BARE = re.compile(r"%(%|\(\w+\)[a-z])?")


def repair_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Escape the bare per cent signs in the help of every argument.

    Args:
        parser: Changed in place.

    Returns:
        The same parser.
    """
    # argparse has no public list of a parser's arguments.
    for action in parser._actions:
        if action.help:
            action.help = _BARE.sub(lambda found: found.group(0) if found[1] else "%%", action.help)
    return parser

"""The `dynmo` command.

Only the chosen subcommand is imported: `dynmo --help` needs neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from megatron_dynmo.config import PREFIX, unknown_flag_message
from megatron_dynmo.errors import ConfigError, DynMoError
from megatron_dynmo.launch import one_line_errors
from megatron_dynmo.version import __version__


class _Command(NamedTuple):
    """Where a subcommand lives and what it is for."""

    module: str
    help: str


COMMANDS = {
    "run": _Command(
        "megatron_dynmo.commands.run", "run your own Megatron training script with the patches"
    ),
    "patches": _Command(
        "megatron_dynmo.commands.patches", "list or check what is patched in Megatron, and why"
    ),
    "corpus": _Command(
        "megatron_dynmo.commands.corpus", "make a Megatron dataset and a tokenizer from text"
    ),
    "doctor": _Command(
        "megatron_dynmo.commands.doctor",
        "say whether layers of a run with these Megatron arguments can be moved",
    ),
    "plan": _Command(
        "megatron_dynmo.commands.plan",
        "find the best layout for measured costs or for Megatron's arguments",
    ),
    "simulate": _Command(
        "megatron_dynmo.commands.simulate",
        "simulate static and dynamic balancing of a scenario or a recorded run",
    ),
}


class CommandParser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and whose mistakes are ConfigErrors of one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise the mistake instead of printing the usage and leaving."""
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def build_parser(command: str | None = None) -> CommandParser:
    """Build the parser, with the arguments of one subcommand.

    Args:
        command: The subcommand to import. The others are only named.
    """
    parser = CommandParser(
        prog="dynmo",
        description="Dynamic load balancing for Megatron-LM: moves layers between pipeline stages "
        "while training.",
    )
    parser.add_argument("--version", action="version", version=f"dynmo {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, entry in COMMANDS.items():
        if name == command:
            importlib.import_module(entry.module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=entry.help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The words after the program's name; by default those of this process.

    Returns:
        The exit status: 0, or what the subcommand returned.

    Raises:
        SystemExit: Status 2 after a mistake, 0 after `--help` or `--version`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with one_line_errors(DynMoError):
        command = words[0] if words and not words[0].startswith("-") else None
        if command is not None and command not in COMMANDS:
            raise ConfigError(_unknown_command(command))
        parser = build_parser(command)
        namespace, unknown = parser.parse_known_args(words)
        if unknown:
            raise ConfigError(_unknown_argument(unknown[0], command, namespace))
        if command is None:
            parser.print_help()
            return 0
        # `run` hands its words on to the script, so it needs them as they were typed.
        namespace.command_argv = words[1:]
        status: int = importlib.import_module(COMMANDS[command].module).run(namespace)
        return status


def _unknown_command(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
    return f"unknown command {name}; {hint}"


def _unknown_argument(word: str, command: str | None, namespace: argparse.Namespace) -> str:
    """One line about a word that the parser does not know; a command may add a hint of its own."""
    flag = word.partition("=")[0]
    if flag.startswith(PREFIX):
        return unknown_flag_message(flag)
    name = f"dynmo {command}" if command else "dynmo"
    hint = getattr(namespace, "unknown_hint", f"see `{name} --help`")
    return f"{name}: unknown argument {flag}; {hint}"


if __name__ == "__main__":
    sys.exit(main())

"""What both ways in share: read the flags, patch Megatron, answer mistakes in one line.

Pure until `start` is called: imports neither torch nor Megatron. The training itself is started by
`pretrain_gpt.py` and by `commands/run.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import (
    BalanceError,
    ConfigError,
    DynMoError,
    LayoutError,
    MigrationError,
    PatchError,
)

EXIT_STATUS_WRONG_USE = 2

# How long a silent rank waits for rank 0, which may still be importing, and rank 0 for the others.
_GRACE_S = 10.0
_HEAD_START_S = 3.0

# What a user can put right. A MigrationError is not among them: its traceback is wanted.
_MISTAKES = (ConfigError, LayoutError, BalanceError, PatchError)


def start() -> DynMoConfig:
    """Read the `--dynmo-*` flags of `sys.argv` and patch Megatron.

    Call it before anything else imports Megatron, so that every later import sees the patches.
    In mode `off` Megatron's own parser does not know the flags, so they are taken off `sys.argv`.

    Returns:
        The settings in force.

    Raises:
        ConfigError: An unknown `--dynmo-*` flag or a bad value.
        PatchError: Megatron does not look as the patches expect.
    """
    import megatron_dynmo

    _let_rank_0_speak()
    config = DynMoConfig.from_argv(sys.argv[1:])
    if config.mode == "off":
        sys.argv[1:] = without_our_flags(sys.argv[1:])
    megatron_dynmo.enable(config)
    return config


def _let_rank_0_speak() -> None:
    """Show this package's lines once, before and after Megatron sets up its own logging."""
    logger = logging.getLogger("megatron_dynmo")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(" dynmo %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO if is_rank_0() else logging.WARNING)


def without_our_flags(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line that belong to others, in their order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    return DynMoConfig.add_arguments(parser).parse_known_args(list(argv))[1]


@contextlib.contextmanager
def one_line_errors(*mistakes: type[DynMoError]) -> Iterator[None]:
    """End the process with status 2 and one line on stderr when the user made a mistake.

    Args:
        *mistakes: The exception classes to answer so; by default those that a user can put right.
            Any other exception passes, and a MigrationError always does.

    Raises:
        SystemExit: Status 2, in place of the mistake.

    Collective:
        None: every rank reads the same command line and so ends by itself, those that stay silent
        last.
    """
    answered = mistakes or _MISTAKES
    try:
        yield
    except MigrationError:
        raise  # also where every error of ours is answered: it may be this rank alone that knows
    except answered as error:
        if _speaks(error):
            print(f"dynmo: error: {one_line(error)}", file=sys.stderr, flush=True)
            _wait_for_the_end(_HEAD_START_S)
        else:
            _wait_for_the_end(_GRACE_S)
        raise SystemExit(EXIT_STATUS_WRONG_USE) from None


def _wait_for_the_end(limit_s: float) -> None:
    """Wait until the launcher ends the job, or for the time given.

    A launcher kills all ranks as soon as one has left: the one that has something to say, or one
    that still starts and would have left by itself with the right status.
    """
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if is_alone or threading.current_thread() is not threading.main_thread():
        return
    job_ends = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: job_ends.set())
    job_ends.wait(limit_s)


def one_line(error: Exception) -> str:
    """Return the error's text with its lines joined into one."""
    lines = filter(None, (line.strip() for line in str(error).splitlines()))
    return "; ".join(lines).replace(":; ", ": ")


def is_rank_0() -> bool:
    """Whether this process is rank 0, or was not started by a launcher."""
    return os.environ.get("RANK", "0") == "0"


def _speaks(error: Exception) -> bool:
    """Whether this rank reports the error.

    The command line is the same everywhere, so rank 0 speaks for all. What Megatron looks like is a
    matter of each node, so there the first rank of each node speaks.
    """
    if is_rank_0():
        return True
    return isinstance(error, PatchError) and os.environ.get("LOCAL_RANK") == "0"

"""`dynmo run SCRIPT ARGS`: run a user's own Megatron training script with the patches applied.

The script is not changed and knows nothing of this package. It sees `sys.argv`, `sys.path[0]` and
`__name__` as if Python had started it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from megatron_dynmo import launch
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `run` command to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run your own Megatron training script with the patches",
        usage="torchrun ... -m megatron_dynmo run [--dynmo-...] SCRIPT [ARGS ...]",
        description="Run an unmodified Megatron training script (a fork of pretrain_gpt.py, say) "
        "with the patches applied. The --dynmo-* flags may stand before SCRIPT or among its "
        "arguments. `run SCRIPT --help` shows the script's own help.",
        allow_abbrev=False,
    )
    DynMoConfig.add_arguments(parser)
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="path of the training script")
    parser.add_argument(
        "arguments",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="the script's arguments, passed on as they are",
    )
    parser.set_defaults(unknown_hint="the script's own arguments come after SCRIPT")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the script.

    Args:
        args: `script`, `arguments` and `command_argv`, the words after `run` as typed.

    Returns:
        0; the script itself may leave with its own status.

    Raises:
        ConfigError: No script, not a file, or a script that never trained.
        PatchError: Megatron does not look as the patches expect.
    """
    script = args.script
    flags = _flags_before_script(args)
    if script is None:
        raise ConfigError(
            "run needs a training script: torchrun ... -m megatron_dynmo run SCRIPT [ARGS ...]"
        )
    if not os.path.isfile(script):
        what = "is not a file" if os.path.exists(script) else "does not exist"
        raise ConfigError(f"run: the script {script} {what}")
    _impersonate(script, [*flags, *args.arguments])
    config = launch.start()
    from megatron_dynmo.adapters import stand_ins

    stand_ins.install()
    runpy.run_path(script, run_name="__main__")
    if config.mode != "off" and not _has_trained():
        raise ConfigError(
            f"run: {script} ended without calling megatron.training.pretrain, "
            "so nothing was measured or moved; give the script that trains"
        )
    return 0


def _flags_before_script(args: argparse.Namespace) -> list[str]:
    """Return the words before SCRIPT: `--dynmo-*` flags, for the script's own command line."""
    words: list[str] = args.command_argv
    tail = len(args.arguments) + (args.script is not None)
    return [word for word in words[: len(words) - tail] if word != "--"]


def _impersonate(script: str, argv: Sequence[str]) -> None:
    """Set `sys.argv` and `sys.path[0]` as Python does for `python SCRIPT ARGS`.

    Before Megatron is imported: a checkout of Megatron beside the script must win over an installed
    one, as it would for the script alone.
    """
    sys.argv = [script, *argv]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))


def _has_trained() -> bool:
    """Whether Megatron's `pretrain` was entered."""
    training = sys.modules.get("megatron.training.training")
    stamps = getattr(training, "_STARTUP_TIMESTAMPS", {})
    return stamps.get("pretrain_entry") is not None

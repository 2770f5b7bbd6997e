"""Megatron's repository-root modules for installations that lack them.

Scripts in the manner of `pretrain_gpt.py` import `gpt_builders` and `model_provider`, which lie in
the root of the repository and are in no wheel. A script that has them beside it, or puts their
folder on `sys.path`, gets its own; any other gets the working stand-ins in this folder.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

NAMES = ("gpt_builders", "model_provider")


class StandInFinder(MetaPathFinder):
    """Finds a stand-in when nothing on `sys.path` has the module."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in, or None for any other module."""
        if fullname not in NAMES:
            return None
        return importlib.util.spec_from_file_location(
            fullname, Path(__file__).with_name(f"{fullname}.py")
        )


def install() -> None:
    """Offer the stand-ins to every later import; harmless when called again.

    The finder goes last, so that `sys.path` is searched first even if the script extends it.
    """
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.append(StandInFinder())

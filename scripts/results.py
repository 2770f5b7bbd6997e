"""Writes benchmarks/results/NAME.json, in the one form that all figures of this project have."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"


def write_results(name: str, kind: str, command: str, cells: Sequence[dict[str, Any]]) -> Path:
    """Write one result file.

    Args:
        name: file name without ending.
        kind: real, emulated or simulated.
        command: what reproduces it.
        cells: rows of the table.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    document = {
        "name": name,
        "kind": kind,
        "machine": machine(),
        "versions": {p: version(p) for p in ("megatron-core", "torch", "megatron-dynmo")},
        "command": command,
        "cells": list(cells),
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

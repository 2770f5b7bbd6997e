"""A trace from what a run recorded: the `profile` events of its events.jsonl."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.trace import CostTrace

__all__ = ["Recording", "read_recording"]

logger = logging.getLogger(__name__)

_EXTRAS = ("first_stage_extra", "last_stage_extra")


@dataclass(frozen=True, eq=False)
class Recording:
    """What a run recorded.

    Attributes:
        trace: costs of every iteration from the first profile to the last line; between two
            profiles the earlier one holds.
        num_stages: pipeline ranks of the run; None where it is not recorded.
        virtual_stages: chunks on each rank; None where it is not recorded.
        num_microbatches: of the first profile; None where it is not recorded.
    """

    trace: CostTrace
    num_stages: int | None
    virtual_stages: int | None
    num_microbatches: int | None


def read_recording(path: Path | str) -> Recording:
    """Read an events.jsonl.

    Raises:
        ConfigError: the file cannot be read, holds no profile, or a line is not what it must be;
            the text names the file and the line.
    """
    profiles: list[tuple[int, dict[str, Any], str]] = []
    last = 0
    for where, event in _lines(Path(path)):
        iteration = event.get("iteration")
        if not isinstance(iteration, int):
            raise ConfigError(f"{where}: iteration is {iteration!r}, must be a whole number")
        last = max(last, iteration)
        if event.get("event") == "profile":
            profiles.append((iteration, event, where))
    if not profiles:
        raise ConfigError(
            f"{path} has no profile event: record one with --dynmo-mode observe (or balance) and "
            "--dynmo-log-dir"
        )
    profiles.sort(key=lambda profile: profile[0])
    first = profiles[0][0]
    rows = [_row(event, where) for _, event, where in profiles]
    num_layers = len(rows[0]["forward_ms"])
    for row, (_, _, where) in zip(rows, profiles, strict=True):
        if len(row["forward_ms"]) != num_layers:
            raise ConfigError(
                f"{where}: {len(row['forward_ms'])} layers after {num_layers} before; give the "
                "events of one run"
            )
    starts = [iteration for iteration, _, _ in profiles]
    at = np.searchsorted(starts, np.arange(first, last + 1), side="right") - 1
    column = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}
    trace = CostTrace(
        forward_ms=column["forward_ms"][at],
        backward_ms=column["backward_ms"][at],
        memory_bytes=column["memory_bytes"][at],
        activation_bytes=column["activation_bytes"].max(axis=0),
        parameters=column["memory_bytes"][0],
        extra_forward_ms=column["extra_forward_ms"][at],
        extra_backward_ms=column["extra_backward_ms"][at],
        extra_memory_bytes=tuple(column["extra_memory_bytes"].max(axis=0).tolist()),
        first_iteration=first,
    )
    return Recording(trace, *_shape(profiles[0][1]))


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, object) of each line; a half line at the end is skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no events.jsonl: it is not UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            event = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                logger.warning("%s breaks off (the run was killed there); skipped", where)
                return
            raise ConfigError(f"{where} is not JSON: {error}") from error
        if not isinstance(event, dict):
            raise ConfigError(f"{where} holds {type(event).__name__}, must be an object")
        yield where, event


def _row(event: dict[str, Any], where: str) -> dict[str, Any]:
    """The costs of one profile event."""
    layers = event.get("layers")
    if not isinstance(layers, list) or not layers:
        raise ConfigError(f"{where}: layers must be a list of at least one layer")
    for number, layer in enumerate(layers, 1):
        found = layer.get("layer_number") if isinstance(layer, dict) else layer
        if found != number:
            raise ConfigError(f"{where}: layer {number} of the list has layer_number {found!r}")
    names = ("forward_ms", "backward_ms", "memory_bytes")
    row: dict[str, Any] = {name: [_number(x, name, where) for x in layers] for name in names}
    row["activation_bytes"] = [_number(x, "activation_bytes", where, 0) for x in layers]
    extras = [_extra(event, name, where) for name in _EXTRAS]
    for name in names:
        row[f"extra_{name}"] = [_number(extra, name, where, 0) for extra in extras]
    return row


def _extra(event: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """What a first or last stage has besides layers; the sum alone counts as a forward."""
    extra = event.get(name)
    if isinstance(extra, dict):
        return extra
    return {"forward_ms": _number(event, f"{name}_ms", where, 0)}


def _number(row: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = row.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{where}: {name} is {value!r}, must be a number of at least 0")
    return float(value)


def _shape(event: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    """(stages, virtual stages, micro-batches) as far as a profile says."""
    stages = [s for s in event.get("stages") or [] if isinstance(s, dict)]
    ranks = {s.get("pp_rank") for s in stages}
    chunks = {s.get("vp_stage") for s in stages}
    count = event.get("num_microbatches")
    return (
        len(ranks) or None,
        len(chunks) or None,
        count if isinstance(count, int) and count > 0 else None,
    )

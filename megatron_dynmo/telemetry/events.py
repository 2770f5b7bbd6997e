"""events.jsonl: what happened in a run, one JSON object a line, and reading it back.

The field names are an interface: reports, the simulator and tests read them. Floats that are
compared bit for bit are written as `float.hex` beside the readable number.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from megatron_dynmo.cost import ExtraCost
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.profile_report import ProfileReport

__all__ = [
    "EventLog",
    "decision_event",
    "digest_event",
    "dynamics_event",
    "elastic_event",
    "iteration_event",
    "migration_event",
    "profile_event",
    "read_events",
]

logger = logging.getLogger(__name__)

_ON_EVERY_LINE = ("iteration", "event", "time_s")
_ELASTIC_EVENTS = ("pack", "release", "park", "rejoin", "restart")
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class EventLog:
    """Appends events to a file; each line reaches the system in one write.

    A resumed run goes on in the same file. A half line that a killed run left is kept and the
    next event starts on a line of its own.

    Args:
        path: the file, whose folder is made; None on ranks that do not write.
        now_s: gives the `time_s` of a line, seconds since the epoch.
        always: fields of every line.

    Raises:
        ConfigError: the file cannot be opened; says why.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        now_s: Callable[[], float] = time.time,
        always: Mapping[str, Any] | None = None,
    ) -> None:
        self._now_s = now_s
        self._always = dict(always or {})
        self._file: BinaryIO | None = None if path is None else _open(Path(path))

    @property
    def is_writing(self) -> bool:
        """Whether this rank writes."""
        return self._file is not None

    def write(self, iteration: int, event: Mapping[str, Any]) -> None:
        """Append one event; does nothing on a rank that does not write.

        Args:
            iteration: 1-based number of the iteration that has ended.
            event: `event` and its fields, as the functions of this module build them.
        """
        if self._file is None:
            return
        assert "event" in event, event
        head = {"iteration": iteration, "event": event["event"], "time_s": self._now_s()}
        line = head | self._always | dict(event)
        try:
            self._file.write(orjson.dumps(line, option=_OPTIONS) + b"\n")
        except OSError as error:  # a full disk must not end the training it reports on
            logger.warning("events are no longer written: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file; later events are not written."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab+", buffering=0)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; choose another folder with --dynmo-log-dir"
        ) from error
    return file


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a log back, in the order written.

    A line that a killed run left unfinished is skipped with a warning.

    Raises:
        ConfigError: the file cannot be read or a line is no event; names the file and the line.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    events = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            event = _parse(line, f"{path}, line {number}")
            if event is not None:
                events.append(event)
    return events


def _parse(line: bytes, where: str) -> dict[str, Any] | None:
    """Return the event of a line; None where it breaks off."""
    text = line.decode("utf-8", "replace")
    try:
        event = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if text.startswith("{") and error.pos >= len(text):
            logger.warning("%s breaks off (the run was killed there); skipped", where)
            return None
        raise ConfigError(f"{where} is not JSON: {error.msg}") from error
    if not isinstance(event, dict):
        raise ConfigError(f"{where} holds a {type(event).__name__}, must be an object")
    missing = [name for name in _ON_EVERY_LINE if name not in event]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    return event


# -------------------------------------------------------------------- the events


def iteration_event(
    *,
    iteration_ms: float,
    lm_loss: float | None,
    grad_norm: float | None,
    tokens_per_s: float | None = None,
) -> dict[str, Any]:
    """Describe an iteration that ended.

    Args:
        iteration_ms: its duration.
        lm_loss: reduced loss; None where there was none (skipped step).
        grad_norm: gradient norm before clipping, or None.
        tokens_per_s: throughput of the whole job, or None.
    """
    return {
        "event": "iteration",
        "iteration_ms": iteration_ms,
        "lm_loss": lm_loss,
        "lm_loss_hex": _hex(lm_loss),
        "grad_norm": grad_norm,
        "grad_norm_hex": _hex(grad_norm),
        "tokens_per_s": tokens_per_s,
    }


def profile_event(report: ProfileReport, *, layout: str | None = None) -> dict[str, Any]:
    """Describe what an iteration cost.

    Args:
        report: the merged measurement.
        layout: Megatron layout string in force.
    """
    costs = report.costs
    return {
        "event": "profile",
        "layout": layout,
        "layers": [
            {
                "layer_number": layer.layer_number,
                "forward_ms": layer.forward_ms,
                "backward_ms": layer.backward_ms,
                "memory_bytes": layer.memory_bytes,
                "activation_bytes": layer.activation_bytes,
            }
            for layer in costs.layers
        ],
        "stages": [
            {
                "pp_rank": stage.pp_rank,
                "vp_stage": stage.vp_stage,
                "busy_ms": stage.busy_ms,
                "idle_ms": stage.idle_ms,
                "forward_ms": stage.forward_ms,
                "backward_ms": stage.backward_ms,
            }
            for stage in report.stages
        ],
        "first_stage_extra_ms": costs.first_stage_extra.total_ms,
        "last_stage_extra_ms": costs.last_stage_extra.total_ms,
        "first_stage_extra": _extra(costs.first_stage_extra),
        "last_stage_extra": _extra(costs.last_stage_extra),
        "num_microbatches": costs.num_microbatches,
        "imbalance": report.imbalance,
        "bubble_fraction": report.bubble_fraction,
        "iteration_ms": report.iteration_ms,
        "forward_backward_ms": report.forward_backward_ms,
        "peak_memory_bytes": list(report.peak_memory_bytes),
    }


def decision_event(
    *,
    action: str,
    reason: str,
    old_layout: str,
    new_layout: str,
    predicted_iteration_ms: float | None = None,
    gain_pct: float | None = None,
    migration_cost_ms: float | None = None,
) -> dict[str, Any]:
    """Describe a decision, also one to stay.

    Args:
        action: move, stay, rollback, pack or advise.
        reason: one line for people.
        old_layout: Megatron layout string in force.
        new_layout: the one decided for; the same when staying.
        predicted_iteration_ms: of the new layout.
        gain_pct: predicted gain over the old one, in percent of its iteration.
        migration_cost_ms: expected cost of the move.
    """
    return {
        "event": "decision",
        "action": action,
        "reason": reason,
        "from": old_layout,
        "to": new_layout,
        "predicted_iteration_ms": predicted_iteration_ms,
        "gain_pct": gain_pct,
        "migration_cost_ms": migration_cost_ms,
    }


def migration_event(
    *,
    old_layout: str,
    new_layout: str,
    num_bytes: int,
    duration_ms: float,
    layers_moved: Sequence[int],
    overlapped_ms: float = 0.0,
) -> dict[str, Any]:
    """Describe a move that was made.

    Args:
        old_layout: Megatron layout string before.
        new_layout: and after.
        num_bytes: bytes sent between ranks, over the whole job.
        duration_ms: for how long training stood still.
        layers_moved: layer numbers, ascending.
        overlapped_ms: for how long optimizer state travelled while the next iteration computed.
    """
    return {
        "event": "migration",
        "from": old_layout,
        "to": new_layout,
        "bytes": num_bytes,
        "duration_ms": duration_ms,
        "layers_moved": list(layers_moved),
        "overlapped_ms": overlapped_ms,
    }


def digest_event(
    *, layers: Mapping[int, str], embedding: str | None, output: str | None
) -> dict[str, Any]:
    """Describe parameters and optimizer state independently of the layout.

    Args:
        layers: {layer_number: sha256}.
        embedding: sha256 of the embedding, None if there is none.
        output: sha256 of final norm and output layer, None if there is none.
    """
    ordered = {number: layers[number] for number in sorted(layers)}
    return {"event": "digest", "layers": ordered, "embedding": embedding, "output": output}


def dynamics_event(kind: str, **changes: Any) -> dict[str, Any]:
    """Describe what a dynamic changed, for example `dynamics_event("freezing", frozen=[1, 2])`."""
    return {"event": "dynamics", "kind": kind, **changes}


def elastic_event(
    event: str, *, ranks: Sequence[int], hosts: Sequence[str] = (), answer: str | None = None
) -> dict[str, Any]:
    """Describe ranks that were packed, released, parked, taken back or are to come back.

    Args:
        event: pack, release, park, rejoin or restart.
        ranks: global ranks concerned.
        hosts: their hosts.
        answer: what the job manager said.
    """
    assert event in _ELASTIC_EVENTS, event
    return {"event": event, "ranks": list(ranks), "hosts": list(hosts), "answer": answer}


def _extra(extra: ExtraCost) -> dict[str, float]:
    return {
        "forward_ms": extra.forward_ms,
        "backward_ms": extra.backward_ms,
        "memory_bytes": extra.memory_bytes,
        "activation_bytes": extra.activation_bytes,
    }


def _hex(value: float | None) -> str | None:
    return None if value is None else float(value).hex()

"""Says what happens: events.jsonl on rank 0, scalars and lines on the rank that logs for Megatron.

Tier: torch, not Megatron.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.migrator import MigrationReport
from megatron_dynmo.profile_report import ProfileReport
from megatron_dynmo.telemetry import events
from megatron_dynmo.telemetry.dynamics_line import dynamics_line
from megatron_dynmo.telemetry.live import live_line
from megatron_dynmo.telemetry.scalars import MigrationTotals, ScalarWriter, profile_scalars
from megatron_dynmo.trigger import Decision

EVENTS_FILE = "events.jsonl"
LOSS = "lm loss"

_speech = logging.getLogger("megatron_dynmo.speech")


class Reporter:
    """Reports one run.

    Args:
        run: a `MegatronRun`.
        config: the settings.
    """

    def __init__(self, run: Any, config: DynMoConfig) -> None:
        self._run = run
        self._log = events.EventLog(
            Path(config.log_dir) / EVENTS_FILE
            if config.log_dir is not None and run.topology.rank == 0
            else None,
            always={"emulated": True} if run.is_emulated else {},
        )
        self._shares_losses = config.log_dir is not None
        self._scalars = ScalarWriter(run.writers())
        self._totals = MigrationTotals()
        self._is_speaker = run.is_writer_rank
        self._latest: tuple[ProfileReport, Decision | None] | None = None
        _let_speak(self._is_speaker or run.topology.rank == 0)

    def say(self, text: str) -> None:
        """Print a line on the rank that prints Megatron's log lines."""
        if self._is_speaker:
            _speech.info(self._marked(text))

    def warn(self, text: str) -> None:
        """Print a warning on that rank."""
        if self._is_speaker:
            _speech.warning(self._marked(text))

    def _marked(self, text: str) -> str:
        """Say in every line that its times are virtual, where they are."""
        if not self._run.is_emulated:
            return text
        head, separator, rest = text.partition(" | ")
        return f"{head} | emulated{separator}{rest}"

    def iteration(
        self, iteration: int, iteration_ms: float, losses: dict[str, Any], grad_norm: Any
    ) -> None:
        """Write an iteration's event.

        Args:
            iteration: 1-based number.
            iteration_ms: wall time on this rank.
            losses: Megatron's reduced losses; empty but on the last stage.
            grad_norm: gradient norm, or None.

        Collective:
            All ranks of the pipeline group when events are written: the loss lives on the last
            stage and rank 0 writes.
        """
        if not self._shares_losses:
            return
        loss = self._shared_loss(losses)
        if self._log.is_writing:
            self._log.write(
                iteration,
                events.iteration_event(
                    iteration_ms=iteration_ms,
                    lm_loss=loss,
                    grad_norm=None if grad_norm is None else float(grad_norm),
                    tokens_per_s=self._run.tokens_per_iteration / iteration_ms * 1e3,
                ),
            )

    def profile(self, iteration: int, report: ProfileReport, layout: LayerLayout) -> None:
        """Write what an iteration cost."""
        self._latest = (report, None)
        self._log.write(iteration, events.profile_event(report, layout=layout.to_megatron()))

    def decision(self, iteration: int, decision: Decision, report: ProfileReport) -> None:
        """Write a decision and the scalars of the window it was taken on."""
        self._latest = (report, decision)
        self._log.write(
            iteration,
            events.decision_event(
                action=decision.action,
                reason=decision.reason,
                old_layout=decision.old.to_megatron(),
                new_layout=decision.new.to_megatron(),
                predicted_iteration_ms=decision.predicted_iteration_ms,
                gain_pct=decision.gain_pct,
                migration_cost_ms=decision.migration_cost_ms,
            ),
        )
        self._scalars.write(
            iteration,
            profile_scalars(
                report,
                decision.old,
                predicted_iteration_ms=decision.predicted_iteration_ms,
                migrations=self._totals,
            )
            | ({"dynmo/emulated": 1.0} if self._run.is_emulated else {}),
        )
        self._scalars.write_decision(iteration, f"{decision.action}: {decision.reason}")

    def packing(
        self,
        iteration: int,
        action: str,
        reason: str,
        old: LayerLayout,
        new: LayerLayout,
        iteration_ms: float,
    ) -> None:
        """Write and say that other stages would do, or are to do.

        Args:
            iteration: 1-based number of the iteration that ended.
            action: `advise` or `pack`.
            reason: one line for a person.
            old: layout in force.
            new: layout on the other stages.
            iteration_ms: predicted for it.
        """
        self._log.write(
            iteration,
            events.decision_event(
                action=action,
                reason=reason,
                old_layout=old.to_megatron(),
                new_layout=new.to_megatron(),
                predicted_iteration_ms=iteration_ms,
            ),
        )
        self.say(f" dynmo iteration {iteration:6d} | {action}: {reason}")

    def elastic(
        self, iteration: int, event: str, ranks: Sequence[int], hosts: Sequence[str]
    ) -> None:
        """Write and say that ranks left or came back.

        Args:
            iteration: 1-based number of the iteration that ended.
            event: pack, park or rejoin.
            ranks: by their number at the start.
            hosts: the nodes they run on.
        """
        self._log.write(iteration, events.elastic_event(event, ranks=ranks, hosts=hosts))
        self.say(_elastic_line(iteration, event, ranks, hosts))

    def answered(
        self, iteration: int, event: str, ranks: Sequence[int], hosts: Sequence[str], answer: str
    ) -> None:
        """Write and say what the job manager answered; only the first rank, which asked, calls.

        Args:
            iteration: 1-based number of the iteration that ended.
            event: release or restart.
            ranks: by their number at the start.
            hosts: the nodes they run on.
            answer: in one line.
        """
        self._log.write(
            iteration, events.elastic_event(event, ranks=ranks, hosts=hosts, answer=answer)
        )
        _speech.info(self._marked(f"{_elastic_line(iteration, event, ranks, hosts)}: {answer}"))

    def live(self, iteration: int, layout: LayerLayout) -> None:
        """Print the one line of a logging interval, when something was measured since."""
        if self._latest is None or iteration % self._run.log_interval:
            return
        report, decision = self._latest
        self._latest = None
        self.say(
            live_line(
                iteration,
                report,
                layout.to_megatron(),
                action=decision.action if decision else None,
                reason=decision.reason if decision else None,
            )
        )

    def migration(
        self, iteration: int, old: LayerLayout, new: LayerLayout, report: MigrationReport
    ) -> None:
        """Write a move that was made."""
        self._totals.add(report.num_bytes, report.duration_ms)
        self._log.write(
            iteration,
            events.migration_event(
                old_layout=old.to_megatron(),
                new_layout=new.to_megatron(),
                num_bytes=report.num_bytes,
                duration_ms=report.duration_ms,
                layers_moved=report.layer_numbers,
                overlapped_ms=report.overlapped_ms,
            ),
        )
        self.say(
            f" dynmo iteration {iteration:6d} | moved {len(report.layer_numbers)} layers, "
            f"{report.num_bytes / 1e6:.1f} MB in {report.duration_ms:.0f} ms: {old} -> {new}"
        )

    def dynamics(self, iteration: int, kind: str, what: Mapping[str, Any]) -> None:
        """Write and say what a dynamic changed."""
        self._log.write(iteration, events.dynamics_event(kind, **what))
        if kind != "moe":  # a measurement, new in almost every iteration
            self.say(dynamics_line(iteration, kind, what))

    def resumed(self, iteration: int, values: Mapping[str, float]) -> None:
        """Say in which state a run goes on, by the numbers of its dynamics that are of no layer."""
        state = {name: value for name, value in values.items() if "layer_" not in name}
        if state:
            self.say(dynamics_line(iteration, "resumed with", state))

    def counters(self, iteration: int, values: Mapping[str, float]) -> None:
        """Write numbers of the dynamics, once a logging interval."""
        if values and iteration % self._run.log_interval == 0:
            self._scalars.write(iteration, {f"dynmo/{k}": v for k, v in values.items()})

    def digest(self, iteration: int, found: dict[str, str]) -> None:
        """Write the digests of a model."""
        layers = {int(unit): sha for unit, sha in found.items() if unit.isdigit()}
        self._log.write(
            iteration,
            events.digest_event(
                layers=layers, embedding=found.get("embedding"), output=found.get("output")
            ),
        )
        self.say(f" dynmo iteration {iteration:6d} | digest {summary(found)}")

    def _shared_loss(self, losses: dict[str, Any]) -> float | None:
        """The loss of the last stage on every rank of the pipeline, bit for bit."""
        topology = self._run.topology
        pair = torch.zeros(2, dtype=torch.float64, device=topology.device)
        if LOSS in losses:
            pair[0], pair[1] = 1.0, float(losses[LOSS])
        dist.broadcast(pair, src=topology.pp_global_ranks[-1], group=topology.pp_group)
        has_loss, loss = pair.tolist()
        return loss if has_loss else None


def summary(found: dict[str, str]) -> str:
    """One short name for all digests together."""
    import hashlib

    joined = "".join(f"{unit}={sha}" for unit, sha in sorted(found.items()))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def _elastic_line(iteration: int, event: str, ranks: Sequence[int], hosts: Sequence[str]) -> str:
    where = f" on {', '.join(hosts)}" if hosts else ""
    return f" dynmo iteration {iteration:6d} | {event}: ranks {list(ranks)}{where}"


def _let_speak(is_speaker: bool) -> None:
    """Send this package's lines to standard output as they are, where Megatron's own go."""
    if not is_speaker or _speech.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _speech.addHandler(handler)
    _speech.setLevel(logging.INFO)
    _speech.propagate = False

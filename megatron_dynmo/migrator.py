"""Moves layers in four phases, on all ranks in lockstep: prepare, transfer, commit, verify.

Tier: torch, not Megatron. What a layer consists of and how a rank takes it in is behind `Stage`;
how bytes travel is behind `Transport`. Until every rank has said that its transfers succeeded
nothing of the running model has changed, and a failure on any rank sends all of them back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_dynmo.consensus import Consensus
from megatron_dynmo.errors import MigrationError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.plan import LayerMove, MigrationPlan
from megatron_dynmo.transport import Parcel, Transport

logger = logging.getLogger(__name__)

PHASES = ("prepare", "transfer", "commit", "verify")


class MoveRefused(MigrationError):
    """A move failed before anything changed: the old layout is in force and training can go on."""


class Stage(Protocol):
    """One rank's side of a move."""

    def prepare(self, plan: MigrationPlan) -> None:
        """Make the running model readable and build empty layers for what arrives.

        Collective:
            All ranks of the world; data-parallel peers gather parameters.
        """

    def parcel(self, layer_number: int) -> Parcel:
        """State of a layer held now; tensors are the live ones and must only be read."""

    def slots(self, move: LayerMove) -> Mapping[str, torch.Tensor]:
        """Tensors of the empty layer that are to be filled, by the parcel's names."""

    def accept(self, move: LayerMove, parcel: Parcel) -> None:
        """Keep what arrived for a layer until commit."""

    def rollback(self) -> None:
        """Forget everything since `prepare`; the running model is as it was."""

    def commit(self, plan: MigrationPlan) -> None:
        """Take in what arrived, let go of what left, rebuild wrapper and optimizer.

        Collective:
            All ranks of the world.
        """

    def fingerprints(self) -> dict[str, int]:
        """Checksum of every unit of state held now: each layer (`layer 3`) and the rest."""

    def check_ownership(self, layout: LayerLayout) -> None:
        """Raise ConservationError unless the pipeline holds exactly this layout.

        Collective:
            All ranks of the pipeline group.
        """


@dataclass(frozen=True)
class MigrationReport:
    """What a move did.

    Attributes:
        layer_numbers: layers that changed their chunk, ascending.
        num_bytes: bytes sent by all ranks of the world.
        duration_ms: wall time of the whole move on this rank.
        phase_ms: wall time by phase on this rank.
    """

    layer_numbers: tuple[int, ...]
    num_bytes: int
    duration_ms: float
    phase_ms: dict[str, float]


class Migrator:
    """Carries out plans.

    Args:
        pp_rank: this rank's pipeline rank.
        stage: this rank's side.
        transport: parcels between pipeline ranks.
        consensus: agreement over all ranks of the world.
    """

    def __init__(
        self, pp_rank: int, stage: Stage, transport: Transport, consensus: Consensus
    ) -> None:
        self._pp_rank = pp_rank
        self._stage = stage
        self._transport = transport
        self._consensus = consensus

    def migrate(self, plan: MigrationPlan) -> MigrationReport:
        """Carry out a plan.

        Collective:
            All ranks of the world, with the same plan, between two iterations.

        Raises:
            MoveRefused: A rank failed in prepare or transfer. The old layout is in force on every
                rank and training can go on.
            MigrationError: A rank failed later; the text says what each rank holds. Training must
                not go on.
        """
        self._consensus.require_same(f"{plan.old}>{plan.new}", "migration plan")
        started = time.perf_counter()
        timings: dict[str, float] = {}
        expected: dict[str, int] = {}
        sent = [0]
        self._reversible(plan, "prepare", timings, lambda: self._prepare(plan, expected))
        self._reversible(plan, "transfer", timings, lambda: self._transfer(plan, expected, sent))
        self._final(plan, "commit", timings, lambda: self._stage.commit(plan))
        self._final(plan, "verify", timings, lambda: self._verify(plan, expected))
        return MigrationReport(
            layer_numbers=plan.layer_numbers,
            num_bytes=self._consensus.total(sent[0]),
            duration_ms=(time.perf_counter() - started) * 1e3,
            phase_ms=timings,
        )

    def _prepare(self, plan: MigrationPlan, expected: dict[str, int]) -> None:
        self._stage.prepare(plan)
        expected.update(self._stage.fingerprints())

    def _transfer(self, plan: MigrationPlan, expected: dict[str, int], sent: list[int]) -> None:
        for move in plan.moves:
            name = unit_name(move.layer_number)
            if move.is_local and move.src_pp_rank == self._pp_rank:
                self._stage.accept(move, self._stage.parcel(move.layer_number))
            elif move.src_pp_rank == self._pp_rank:
                parcel = self._stage.parcel(move.layer_number)
                parcel.values["fingerprint"] = expected.pop(name)
                self._transport.send(parcel, move.dst_pp_rank)
                sent[0] += parcel.num_bytes
            elif move.dst_pp_rank == self._pp_rank:
                slots = self._stage.slots(move)
                parcel = self._transport.receive(name, move.src_pp_rank, slots)
                expected[name] = parcel.values.pop("fingerprint")
                self._stage.accept(move, parcel)

    def _verify(self, plan: MigrationPlan, expected: dict[str, int]) -> None:
        self._stage.check_ownership(plan.new)
        found = self._stage.fingerprints()
        wrong = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
        if wrong:
            raise MigrationError(f"state changed on its way: {', '.join(wrong)}")

    def _reversible(
        self, plan: MigrationPlan, phase: str, timings: dict[str, float], body: Callable[[], None]
    ) -> None:
        failures = self._run(phase, timings, body)
        if failures:
            self._stage.rollback()
            raise MoveRefused(
                f"moving {plan.old} to {plan.new} failed in {phase}: {failures}. "
                f"Every rank still holds {plan.old}; training goes on there"
            )

    def _final(
        self, plan: MigrationPlan, phase: str, timings: dict[str, float], body: Callable[[], None]
    ) -> None:
        failures = self._run(phase, timings, body)
        if failures:
            held = "its old or new layers" if phase == "commit" else f"the layers of {plan.new}"
            raise MigrationError(
                f"moving {plan.old} to {plan.new} failed in {phase}: {failures}. "
                f"Each rank holds {held}; restart from the last checkpoint"
            )

    def _run(self, phase: str, timings: dict[str, float], body: Callable[[], None]) -> str:
        """Run a phase here and return what failed on any rank; empty when nothing did."""
        started = time.perf_counter()
        error: Exception | None = None
        try:
            body()
        except Exception as caught:
            logger.debug("%s failed", phase, exc_info=True)
            error = caught
        failures = self._consensus.failures(error)
        timings[phase] = (time.perf_counter() - started) * 1e3
        return failures


def unit_name(layer_number: int) -> str:
    """Name of a layer in parcels, fingerprints and messages."""
    return f"layer {layer_number}"

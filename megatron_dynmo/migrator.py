"""Moves layers on all ranks in lockstep: prepare, transfer, commit (and rebuild), verify.

Tier: torch, not Megatron. What a layer consists of and how a rank takes it in is behind `Stage`;
how bytes travel is behind `Transport`. Until every rank has said that its transfers succeeded
nothing of the running model has changed, and a failure on any rank sends all of them back.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_dynmo.consensus import Consensus
from megatron_dynmo.errors import MigrationError, TransportError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.plan import LayerMove, MigrationPlan
from megatron_dynmo.transport import Parcel, Transport

logger = logging.getLogger(__name__)

_RESTART = "Training must not go on: restart from the last checkpoint"


class MoveRefused(MigrationError):
    """A move failed before anything changed: the old layout is in force and training can go on."""


class FailedAlone(MigrationError):
    """This rank has failed where it cannot tell the others but by ending."""


class Stage(Protocol):
    """One rank's side of a move.

    Attributes:
        new_tensors: first letters of parcel names for which an empty layer has no slot.
    """

    new_tensors: tuple[str, ...]

    def layers(self) -> Mapping[int, Any]:
        """The layers held now, by layer_number."""

    def prepare(self, plan: MigrationPlan) -> None:
        """Build empty layers for what arrives, once nothing else uses the model.

        What can fail on one rank alone belongs here and not into `settle`.

        Collective:
            All ranks of the world, to end what they began together before (a checkpoint).
        """

    def settle(self) -> None:
        """Make the running model readable; every rank has prepared.

        Collective:
            Data-parallel peers gather parameters.
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
        """Take in what arrived and let go of what left; talks to no other rank.

        A failure here must not keep the others waiting in a collective.
        """

    def rebuild(self) -> None:
        """Make the optimizer fit what is held now; it may lose all state.

        Collective:
            All ranks of the world.
        """

    def restore(self) -> None:
        """Give the optimizer back its state; talks to no other rank."""

    def fingerprints(self) -> dict[str, int]:
        """Checksum of every unit of state held now: each layer (`layer 3`) and the rest."""

    def check_ownership(self, layout: LayerLayout) -> None:
        """Raise ConservationError unless this rank holds exactly its part of a layout.

        Talks to no other rank: when every rank holds its part, each layer is held once.
        """


@dataclass(frozen=True)
class MigrationReport:
    """What a move did.

    Attributes:
        layer_numbers: layers that changed their chunk, ascending.
        num_bytes: bytes sent by all ranks of the world.
        duration_ms: wall time of the whole move on the slowest rank.
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
        with self._heard_by_all(plan, "the beginning"):
            self._consensus.require_same(f"{plan.old}>{plan.new}", "migration plan")
        started = time.perf_counter()
        timings: dict[str, float] = {}
        expected: dict[str, int] = {}
        sent = [0]
        self._reversible(plan, "prepare", timings, lambda: self._stage.prepare(plan))
        # Agreed in between: a rank that fails alone must not be missing where others gather.
        self._reversible(plan, "prepare", timings, lambda: self._settle(expected))
        self._reversible(plan, "transfer", timings, lambda: self._transfer(plan, expected, sent))
        self._final(plan, "commit", timings, lambda: self._stage.commit(plan))
        self._final(plan, "rebuild", timings, self._stage.rebuild, is_collective=True)
        self._final(plan, "rebuild", timings, self._stage.restore)
        self._final(plan, "verify", timings, lambda: self._verify(plan, expected))
        with self._heard_by_all(plan, "the end"):
            return MigrationReport(
                layer_numbers=plan.layer_numbers,
                num_bytes=self._consensus.total(sent[0]),
                # Decisions rest on it, so every rank must have the same number.
                duration_ms=self._consensus.slowest((time.perf_counter() - started) * 1e3),
                phase_ms=timings,
            )

    def _settle(self, expected: dict[str, int]) -> None:
        self._stage.settle()
        expected.update(self._stage.fingerprints())

    def _transfer(self, plan: MigrationPlan, expected: dict[str, int], sent: list[int]) -> None:
        """Carry out the moves of this rank; after a failure, call off those that are left.

        A rank that just stopped would leave the peers of its later moves waiting for it.
        """
        failure: Exception | None = None
        for move in plan.moves:
            try:
                if failure is None:
                    self._carry(move, expected, sent)
                else:
                    self._call_off(move)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _carry(self, move: LayerMove, expected: dict[str, int], sent: list[int]) -> None:
        name = unit_name(move.layer_number)
        is_source, is_target = (
            rank == self._pp_rank for rank in (move.src_pp_rank, move.dst_pp_rank)
        )
        if is_source and is_target:
            self._stage.accept(move, self._stage.parcel(move.layer_number))
        elif is_source:
            with self._called_off_on_error(move):
                parcel = self._stage.parcel(move.layer_number)
                parcel.values["fingerprint"] = expected.pop(name)
            self._transport.send(parcel, move.dst_pp_rank)
            sent[0] += parcel.num_bytes
        elif is_target:
            with self._called_off_on_error(move):
                slots = self._stage.slots(move)
            parcel = self._transport.receive(name, move.src_pp_rank, slots, self._stage.new_tensors)
            expected[name] = parcel.values.pop("fingerprint")
            self._stage.accept(move, parcel)

    def _call_off(self, move: LayerMove) -> None:
        """Tell the other rank of a move that this one will not make it."""
        name = unit_name(move.layer_number)
        if move.is_local:
            return
        if move.src_pp_rank == self._pp_rank:
            self._transport.call_off_sending(name, move.dst_pp_rank)
        elif move.dst_pp_rank == self._pp_rank:
            self._transport.call_off_receiving(name, move.src_pp_rank)

    @contextlib.contextmanager
    def _called_off_on_error(self, move: LayerMove) -> Iterator[None]:
        try:
            yield
        except Exception:
            with contextlib.suppress(TransportError):
                self._call_off(move)
            raise

    def _verify(self, plan: MigrationPlan, expected: dict[str, int]) -> None:
        self._stage.check_ownership(plan.new)
        found = self._stage.fingerprints()
        wrong = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
        if wrong:
            raise MigrationError(f"state changed on its way: {', '.join(wrong)}")

    def _reversible(
        self, plan: MigrationPlan, phase: str, timings: dict[str, float], body: Callable[[], None]
    ) -> None:
        failures = self._run(plan, phase, timings, body)
        if not failures:
            return
        not_undone = self._run(plan, "rollback", timings, self._stage.rollback)
        what = f"moving {plan.old} to {plan.new} failed in {phase}: {failures}"
        if not_undone:
            raise MigrationError(f"{what}; going back failed too: {not_undone}. {_RESTART}")
        with self._heard_by_all(plan, "rollback"):
            lost_links = self._consensus.total(self._transport.has_lost_links)
        if lost_links:
            raise MigrationError(
                f"{what}. Every rank still holds {plan.old}, but a link between ranks is lost. "
                f"{_RESTART}"
            )
        raise MoveRefused(f"{what}. Every rank still holds {plan.old}; training goes on there")

    def _final(
        self,
        plan: MigrationPlan,
        phase: str,
        timings: dict[str, float],
        body: Callable[[], None],
        *,
        is_collective: bool = False,
    ) -> None:
        others = f"Every other rank holds its layers of {plan.new}. {_RESTART}"

        def explained() -> None:
            try:
                body()
            except Exception as error:
                what = f"holding {self._held()}, {type(error).__name__}: {error}"
                if is_collective:
                    # The others may wait inside it, where no agreement of ours can reach them:
                    # this rank ends, and with it their wait and the job.
                    raise FailedAlone(
                        f"moving {plan.old} to {plan.new} failed in {phase} on this rank, {what}. "
                        f"{others}"
                    ) from error
                raise MigrationError(what) from error

        failures = self._run(plan, phase, timings, explained)
        if failures:
            raise MigrationError(
                f"moving {plan.old} to {plan.new} failed in {phase}: {failures}. {others}"
            )

    def _run(
        self, plan: MigrationPlan, phase: str, timings: dict[str, float], body: Callable[[], None]
    ) -> str:
        """Run a phase, or a part of it, and return what failed on any rank; empty for nothing.

        Raises:
            MigrationError: The ranks could not agree, since one has died or does not answer.
        """
        started = time.perf_counter()
        error: Exception | None = None
        try:
            body()
        except FailedAlone:
            raise
        except Exception as caught:
            logger.debug("%s failed", phase, exc_info=True)
            error = caught
        with self._heard_by_all(plan, phase, error):
            failures = self._consensus.failures(error)
        timings[phase] = timings.get(phase, 0.0) + (time.perf_counter() - started) * 1e3
        return failures

    @contextlib.contextmanager
    def _heard_by_all(
        self, plan: MigrationPlan, phase: str, error: Exception | None = None
    ) -> Iterator[None]:
        """Around an agreement: where it cannot be had, say what is known here.

        Raises:
            MigrationError: A rank has died or does not answer.
        """
        try:
            yield
        except RuntimeError as gone:
            reason = (str(gone) or type(gone).__name__).splitlines()[0]
            own = f"here: {type(error).__name__}: {error}" if error else "nothing failed here"
            raise MigrationError(
                f"moving {plan.old} to {plan.new}: a rank was lost in {phase} "
                f"({reason}); {own}. This rank holds {self._held()}. {_RESTART}"
            ) from gone

    def _held(self) -> str:
        return f"layers {sorted(self._stage.layers())}"


def unit_name(layer_number: int) -> str:
    """Name of a layer in parcels, fingerprints and messages."""
    return f"layer {layer_number}"

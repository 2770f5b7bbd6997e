"""Moves layers on all ranks in lockstep: prepare, transfer, commit (and rebuild), verify.

Tier: torch, not Megatron. What a layer consists of and how a rank takes it in is behind `Stage`;
how bytes travel is behind `Transport`. Until every rank has said that its transfers succeeded
nothing of the running model has changed, and a failure on any rank sends all of them back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron_dynmo.consensus import Consensus
from megatron_dynmo.errors import MigrationError, TransportError
from megatron_dynmo.late_state import Flight, LateParcel
from megatron_dynmo.plan import LayerMove, MigrationPlan
from megatron_dynmo.stage import Stage, late_name, unit_name
from megatron_dynmo.transport import Parcel, Transport, describe

logger = logging.getLogger(__name__)

_RESTART = "Training must not go on: restart from the last checkpoint"


class MoveRefused(MigrationError):
    """A move failed before anything changed: the old layout is in force and training can go on."""


class FailedAlone(MigrationError):
    """This rank has failed where it cannot tell the others but by ending."""


@dataclass(frozen=True)
class MigrationReport:
    """What a move did.

    Attributes:
        layer_numbers: layers that changed their chunk, ascending.
        num_bytes: bytes sent by all ranks of the world.
        duration_ms: for how long training stood still, on the slowest rank.
        phase_ms: wall time by phase on this rank.
        overlapped_ms: for how long optimizer state travelled while the next iteration computed,
            on the slowest rank.
    """

    layer_numbers: tuple[int, ...]
    num_bytes: int
    duration_ms: float
    phase_ms: dict[str, float]
    overlapped_ms: float = 0.0


@dataclass
class _Account:
    """What one rank knows of the move it is in.

    Attributes:
        plan: what moves where.
        overlap: whether layers travel in two parts.
        expected: checksum of each unit that it should hold in the end.
        num_bytes: sent by it.
        late: second parts, in the order of the plan.
    """

    plan: MigrationPlan
    overlap: bool
    expected: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    late: list[LateParcel] = field(default_factory=list)

    @property
    def in_two(self) -> frozenset[int]:
        """layer_number of those that travel in two parts."""
        moves = self.plan.moves if self.overlap else ()
        return frozenset(move.layer_number for move in moves if not move.is_local)


class Migrator:
    """Carries out plans.

    Args:
        pp_rank: this rank's pipeline rank.
        stage: this rank's side.
        transport: parcels between pipeline ranks.
        consensus: agreement over all ranks of the world.
        late_transport: between the same ranks, for what travels while an iteration computes; None
            where everything is to be there at once.
    """

    def __init__(
        self,
        pp_rank: int,
        stage: Stage,
        transport: Transport,
        consensus: Consensus,
        late_transport: Transport | None = None,
    ) -> None:
        self._pp_rank = pp_rank
        self._stage = stage
        self._transport = transport
        self._consensus = consensus
        self._late_transport = late_transport
        self._in_flight: tuple[MigrationPlan, MigrationReport, Flight] | None = None

    def migrate(self, plan: MigrationPlan, *, overlap: bool = False) -> MigrationReport:
        """Carry out a plan.

        Args:
            plan: what moves where.
            overlap: let the optimizer's state follow while the next iteration computes; `land`
                must be called before its optimizer step.

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
        assert self._in_flight is None, "the last move has not landed"
        assert not overlap or self._late_transport is not None
        started = time.perf_counter()
        timings: dict[str, float] = {}
        account = _Account(plan, overlap)
        self._reversible(plan, "prepare", timings, lambda: self._stage.prepare(plan))
        # Agreed in between: a rank that fails alone must not be missing where others gather.
        self._reversible(plan, "prepare", timings, lambda: self._settle(account))
        self._reversible(plan, "transfer", timings, lambda: self._transfer(account))
        self._final(plan, "commit", timings, lambda: self._stage.commit(plan))
        self._final(plan, "rebuild", timings, self._stage.rebuild, is_collective=True)
        self._final(plan, "rebuild", timings, self._stage.restore)
        self._final(plan, "verify", timings, lambda: self._verify(account))
        flights: list[Flight] = []
        if overlap:
            self._final(plan, "verify", timings, lambda: flights.append(self._flight(account)))
        with self._heard_by_all(plan, "the end"):
            report = MigrationReport(
                layer_numbers=plan.layer_numbers,
                num_bytes=self._consensus.total(account.num_bytes),
                # Decisions rest on it, so every rank must have the same number.
                duration_ms=self._consensus.slowest((time.perf_counter() - started) * 1e3),
                phase_ms=timings,
            )
        if flights:
            self._in_flight = plan, report, flights[0]
        return report

    def _flight(self, account: _Account) -> Flight:
        """Send the late parcels on their way."""
        assert self._late_transport is not None
        return Flight(self._pp_rank, self._late_transport, account.late, self._stage.fingerprint)

    def land(self) -> MigrationReport:
        """Wait for what follows the layers of the last move, which was made with `overlap`.

        Returns:
            The report of the move, with what was waited for here as a phase of its own.

        Collective:
            All ranks of the world, after the backward passes of the iteration that followed the
            move and before its optimizer step.

        Raises:
            MigrationError: Something did not arrive as it left. Training must not go on.
        """
        assert self._in_flight is not None
        plan, report, flight = self._in_flight
        self._in_flight = None
        timings = dict(report.phase_ms)
        self._final(plan, "landing", timings, flight.land)
        with self._heard_by_all(plan, "the end"):
            return dataclasses.replace(
                report,
                # The last rank to come waits for the state alone, the others for it as well.
                duration_ms=report.duration_ms + self._consensus.least(timings["landing"]),
                phase_ms=timings,
                overlapped_ms=self._consensus.slowest(flight.duration_ms),
            )

    def _settle(self, account: _Account) -> None:
        self._stage.settle()
        account.expected.update(self._stage.fingerprints(account.in_two))

    def _transfer(self, account: _Account) -> None:
        """Carry out the moves of this rank; after a failure, call off those that are left.

        A rank that just stopped would leave the peers of its later moves waiting for it.
        """
        failure: Exception | None = None
        for move in account.plan.moves:
            try:
                if failure is None:
                    self._carry(move, account)
                else:
                    self._call_off(move)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _carry(self, move: LayerMove, account: _Account) -> None:
        name = unit_name(move.layer_number)
        is_source, is_target = (
            rank == self._pp_rank for rank in (move.src_pp_rank, move.dst_pp_rank)
        )
        if is_source and is_target:
            self._stage.accept(move, self._stage.parcel(move.layer_number))
        elif is_source:
            with self._called_off_on_error(move):
                parcel = self._outgoing(move, account)
            self._transport.send(parcel, move.dst_pp_rank)
        elif is_target:
            with self._called_off_on_error(move):
                slots = self._stage.slots(move)
            parcel = self._transport.receive(name, move.src_pp_rank, slots, self._stage.new_tensors)
            account.expected[name] = parcel.values.pop("fingerprint")
            if account.overlap:
                # Room for what follows is made while a failure still leaves the old layout.
                later = Parcel(late_name(name), self._transport.allocate(parcel.values.pop("late")))
                account.late.append(LateParcel(move, later))
                parcel.tensors |= later.tensors
            self._stage.accept(move, parcel)

    def _outgoing(self, move: LayerMove, account: _Account) -> Parcel:
        """What is sent of a layer at once."""
        if not account.overlap:
            parcel = self._stage.parcel(move.layer_number)
            parcel.values["fingerprint"] = account.expected.pop(unit_name(move.layer_number))
            account.num_bytes += parcel.num_bytes
            return parcel
        parcel, later = self._parted(move.layer_number)
        parcel.values["fingerprint"] = self._stage.fingerprint(parcel)
        parcel.values["late"] = describe(later.tensors)
        later.values["fingerprint"] = self._stage.fingerprint(later)
        account.late.append(LateParcel(move, later))
        account.num_bytes += parcel.num_bytes + later.num_bytes
        return parcel

    def _parted(self, layer_number: int) -> tuple[Parcel, Parcel]:
        """A layer held now: what goes at once, and what may follow."""
        whole = self._stage.parcel(layer_number)
        now = Parcel(whole.label, values=whole.values)
        later = Parcel(late_name(whole.label))
        for name, tensor in whole.tensors.items():
            part = later if name.startswith(self._stage.late_tensors) else now
            part.tensors[name] = tensor
        return now, later

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

    def _verify(self, account: _Account) -> None:
        self._stage.check_ownership(account.plan.new)
        expected, found = account.expected, self._stage.fingerprints(account.in_two)
        late = {parcel.move.layer_number: parcel for parcel in account.late}
        for number in account.in_two & self._stage.layers().keys():
            now, later = self._parted(number)
            found[unit_name(number)] = self._stage.fingerprint(now)
            late[number].hold(later)
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
        what = "the weights of its layers" if phase == "landing" else "its layers"
        others = f"Every other rank holds {what} of {plan.new}. {_RESTART}"

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

"""What is asked of the job manager: to take nodes back, and to start the run anew with more.

Nodes are given back once the ranks on them have exited, and training never waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.elastic.managers import ManagerError, NodeChange, make_manager
from megatron_dynmo.elastic.meeting import Host

logger = logging.getLogger(__name__)

_SETTLE_S = 4.0  # between a rank's last word and the end of its process
_END_S = 10.0  # that the end of training waits for a manager


@dataclass
class _Pending:
    """Nodes on their way to the job manager."""

    change: NodeChange
    generation: int
    left_at: float | None = None
    thread: threading.Thread | None = None
    answer: str = ""
    errors: list[str] = field(default_factory=list)


class NodeRelease:
    """Gives nodes back; the first rank acts, the others only agree.

    Args:
        config: the settings.
        host: by which ranks that exit are heard.
        reporter: that of the run.
        acts: whether this is the first rank.
    """

    def __init__(self, config: DynMoConfig, host: Host, reporter: Any, acts: bool) -> None:
        self._exits = config.release != "park"
        self._restarts = config.restarts
        self._name = config.job_manager
        self._manager = make_manager(config.job_manager)
        self._host = host
        self._reporter = reporter
        self._acts = acts
        self._pending: list[_Pending] = []

    def may_exit(self, iteration: int, consensus: Any) -> bool:
        """Whether ranks that are packed away now are to exit; parked ones can still come back.

        Collective:
            All ranks that train.
        """
        if not self._exits:
            return False
        problem = self._problem() if self._acts else None
        if problem is not None:
            logger.warning(
                "iteration %d: the job manager %s would not take the nodes (%s): ranks that are "
                "packed away are parked instead",
                iteration,
                self._name,
                problem,
            )
        return not consensus.of_rank_0([int(problem is not None)])[0]

    def _problem(self) -> str | None:
        try:
            if self._manager is not None:
                self._manager.check(self._restarts)
        except ManagerError as error:
            return str(error)
        except Exception as error:  # whatever a manager does, training goes on
            return f"{type(error).__name__}: {error}"
        return None

    def may_restart(
        self,
        iteration: int,
        ranks: Sequence[int],
        hosts: Sequence[str],
        num_nodes: int,
        consensus: Any,
    ) -> bool:
        """Ask that the run is started anew once it has saved and ended.

        Args:
            iteration: last one completed.
            ranks: that are needed again.
            hosts: the nodes they ran on.
            num_nodes: that the run needs then.
            consensus: of the ranks that train.

        Returns:
            Whether it is; if not, it has to go on.

        Collective:
            All ranks that train.
        """
        answer = self._asked_to_restart(iteration, num_nodes) if self._acts else None
        if answer is not None:
            self._reporter.answered(iteration, "restart", ranks, hosts, answer)
        return bool(consensus.of_rank_0([int(answer is not None)])[0])

    def _asked_to_restart(self, iteration: int, num_nodes: int) -> str | None:
        """The manager's answer; None for a no."""
        assert self._manager is not None
        try:
            return self._manager.restart(iteration, num_nodes)
        except Exception as error:  # whatever a manager does, training goes on
            logger.warning(
                "iteration %d: the job manager %s does not start the run again (%s: %s): training "
                "goes on with the stages that it has",
                iteration,
                self._name,
                type(error).__name__,
                error,
            )
            return None

    def begin(self, change: NodeChange, generation: int) -> None:
        """Ranks exit now: give their nodes back when they have."""
        if self._acts:
            self._pending.append(_Pending(change, generation))

    def follow(self, iteration: int) -> None:
        """Go on with what is pending, without waiting.

        One change after the other: each shrinks the list of nodes that the one before it has left.
        """
        for pending in self._pending:
            if pending.left_at is None and self._host.have_left(
                pending.change.ranks, pending.generation
            ):
                pending.left_at = time.monotonic()
        while self._pending and self._has_answer(self._pending[0]):
            self._tell(iteration, self._pending.pop(0))

    def end(self, iteration: int) -> None:
        """Training is over: wait a little for what is pending."""
        deadline = time.monotonic() + _END_S
        while self._pending and time.monotonic() < deadline:
            self.follow(iteration)
            time.sleep(0.05)
        for pending in self._pending:
            logger.warning("the job manager %s has not answered: %s", self._name, pending.change)

    def _has_answer(self, pending: _Pending) -> bool:
        if pending.thread is not None:
            return not pending.thread.is_alive()
        if pending.left_at is not None and time.monotonic() - pending.left_at >= _SETTLE_S:
            pending.thread = threading.Thread(
                target=self._ask, args=(pending,), name="dynmo-job-manager", daemon=True
            )
            pending.thread.start()
        return False

    def _ask(self, pending: _Pending) -> None:
        """In a thread of its own."""
        try:
            if self._manager is not None:
                pending.answer = self._manager.release(pending.change)
        except Exception as error:  # whatever a manager does, training goes on
            pending.errors.append(f"{type(error).__name__}: {error}")

    def _tell(self, iteration: int, pending: _Pending) -> None:
        change = pending.change
        if pending.errors:
            logger.warning(
                "iteration %d: the job manager %s failed: %s; training goes on, the nodes stay "
                "with the job",
                iteration,
                self._name,
                pending.errors[0],
            )
        self._reporter.answered(
            iteration,
            "release",
            change.ranks,
            change.freed_nodes,
            pending.errors[0] if pending.errors else pending.answer or "exited",
        )

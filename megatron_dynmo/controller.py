"""The one object the patches talk to: meets a run, and hands on what happens in it.

Tier: torch, not Megatron; a run is seen through `MegatronRun`. Everything happens between two
iterations, on all ranks in lockstep and from the same numbers; only optimizer state may follow its
layer while the next iteration computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.consensus import Consensus
from megatron_dynmo.elastic.meeting import Go
from megatron_dynmo.patching import PatchSet
from megatron_dynmo.session import Session
from megatron_dynmo.version import __version__


class Controller:
    """Follows one training run from set-up to its end.

    Args:
        config: the settings.
        patches: the set this controller hangs off; its digest is compared across ranks.

    Attributes:
        dynamics: the run's `Dynamics`, made when its first layers are built; None without any.
        form_groups: makes all process groups of the run anew, once Megatron has made them.
    """

    def __init__(self, config: DynMoConfig, patches: PatchSet) -> None:
        self._config = config
        self._patches = patches
        self._session: Session | None = None
        self.dynamics: Any = None
        self.form_groups: Any = None

    @property
    def config(self) -> DynMoConfig:
        """The settings."""
        return self._config

    @property
    def must_move(self) -> bool:
        """Whether a model whose layers cannot be moved is a mistake."""
        return self._config.mode == "balance"

    def join(self, run: Any) -> None:
        """Meet the model and optimizer, built and loaded.

        Args:
            run: a `MegatronRun`.

        Raises:
            ConfigError: Layers of this run cannot be moved.
            DynMoError: Ranks run different patches or settings.

        Collective:
            All ranks of the world.
        """
        consensus = Consensus(run.device)
        consensus.require_same(
            f"{__version__} {self._patches.digest()} {self._config}", "patches and settings"
        )
        run.start_dynamics()
        self._session = Session(self._config, run, consensus, self.form_groups)

    def begin_iteration(self, iteration: int) -> None:
        """Before a step: let ranks leave or come back, and make a move that is due.

        Args:
            iteration: 1-based number of the iteration that begins.

        Raises:
            LeavesTraining: This rank was packed away.
            MigrationError: A move failed after its point of no return.

        Collective:
            All ranks of the world, where ranks may leave or a move is due.
        """
        if self._session is not None:
            self._session.begin_iteration(iteration)

    def begin_schedule(self) -> None:
        """The pipeline schedule of the iteration starts."""
        if self._session is not None:
            self._session.observer.begin_schedule()

    def end_schedule(self) -> None:
        """All gradients of the iteration are there, and the optimizer has not stepped.

        Raises:
            MigrationError: State that followed a moved layer did not arrive.

        Collective:
            All ranks of the world, where something follows.
        """
        if self._session is not None:
            self._session.land()

    def end_iteration(self, iteration: int, losses: dict[str, Any], grad_norm: Any) -> None:
        """After a step: report, decide, move.

        Args:
            iteration: 1-based number of the iteration that ended.
            losses: Megatron's reduced losses; empty but on the last stage.
            grad_norm: gradient norm, or None.

        Raises:
            MigrationError: A move failed after its point of no return.

        Collective:
            All ranks of the world.
        """
        session = self._session
        if session is None:
            return
        session.measure(iteration, losses, grad_norm)
        has_changed = session.change(iteration, grad_norm)
        if not session.force(iteration):
            session.balance(iteration, has_changed)
        session.remember()
        session.report(iteration)

    def come_back(self, go: Go, arrived: Callable[[], None]) -> None:
        """A parked rank is wanted again; see `Elasticity.come_back`."""
        assert self._session is not None and self._session.elasticity is not None
        self._session.elasticity.come_back(go, arrived)

    def end(self) -> None:
        """Training is over, or failed on this rank."""
        if self._session is not None and self._session.elasticity is not None:
            self._session.elasticity.end()

    def forward_step(self, vp_stage: int) -> AbstractContextManager[Callable[[Any], None]]:
        """Around the forward step of a micro-batch; yields what takes the step's output."""
        if self._session is None:
            return contextlib.nullcontext(_ignore)
        return self._session.observer.forward_step(vp_stage)

    def backward_step(self, output: Any) -> AbstractContextManager[None]:
        """Around the backward step of a micro-batch."""
        if self._session is None:
            return contextlib.nullcontext()
        return self._session.observer.backward_step(output)


def _ignore(output: Any) -> None:
    """Take the output of a step that nobody measures."""

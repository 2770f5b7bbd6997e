"""The one object the patches talk to: measures, decides, moves, reports.

Tier: torch, not Megatron; a run is seen through `MegatronRun`. Everything happens between two
iterations, on all ranks in lockstep.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from megatron_dynmo import __version__
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.consensus import Consensus
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.migrator import Migrator, MoveRefused
from megatron_dynmo.patching import PatchSet
from megatron_dynmo.plan import build_plan
from megatron_dynmo.transport import Transport

logger = logging.getLogger(__name__)


class Controller:
    """Follows one training run from set-up to its end.

    Args:
        config: the settings.
        patches: the set this controller hangs off; its digest is compared across ranks.
    """

    def __init__(self, config: DynMoConfig, patches: PatchSet) -> None:
        self._config = config
        self._patches = patches
        self._forced = {move.iteration: move.layout for move in config.forced_moves}
        self._run: Any = None
        self._layout: LayerLayout | None = None
        self._migrator: Migrator | None = None

    # ---------------------------------------------------------------- called by the patches

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
        if run.optimizer is None:
            logger.info("nothing is trained here; megatron_dynmo stays aside")
            return
        topology = run.topology
        consensus = Consensus(run.device, pipeline=topology.pp_group)
        consensus.require_same(
            f"{__version__} {self._patches.digest()} {self._config}", "patches and settings"
        )
        self._run = run
        self._layout = run.stage.layout
        if self._config.mode == "balance" and topology.pp_size > 1:
            run.check_movable(self._config)
            transport = Transport(topology.pp_group, topology.pp_global_ranks, run.device)
            self._migrator = Migrator(topology.pp_rank, run.stage, transport, consensus)

    def begin_iteration(self, iteration: int) -> None:
        """Before a step.

        Args:
            iteration: 1-based number of the iteration that begins.
        """

    def end_iteration(
        self, iteration: int, losses: dict[str, Any], grad_norm: Any, skipped: bool
    ) -> None:
        """After a step: report, decide, move.

        Args:
            iteration: 1-based number of the iteration that ended.
            losses: Megatron's reduced losses; empty but on the last stage.
            grad_norm: gradient norm, or None.
            skipped: whether the optimizer skipped the step (fp16 overflow).

        Raises:
            MigrationError: A move failed after its point of no return.

        Collective:
            All ranks of the world.
        """
        if self._run is None:
            return
        if self._migrator is not None and iteration in self._forced:
            self._move(iteration, self._run.parse_layout(self._forced[iteration]))

    @contextlib.contextmanager
    def forward_step(self, vp_stage: int) -> Iterator[Callable[[Any], None]]:
        """Around the forward step of a micro-batch; yields what takes the step's output."""
        yield lambda output: None

    @contextlib.contextmanager
    def backward_step(self, output: Any) -> Iterator[None]:
        """Around the backward step of a micro-batch."""
        yield

    # ---------------------------------------------------------------- moving

    def _move(self, iteration: int, new: LayerLayout) -> None:
        assert self._migrator is not None and self._layout is not None
        if new == self._layout:
            return
        self._run.check_layout(new)
        try:
            report = self._migrator.migrate(build_plan(self._layout, new))
        except MoveRefused as refusal:
            logger.warning("%s", refusal)
            return
        logger.info("moved %s -> %s: %s", self._layout, new, report)
        self._layout = new

"""What follows one run: measures, decides, moves, reports.

Tier: torch, not Megatron.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.consensus import Consensus
from megatron_dynmo.cost import ModelCosts
from megatron_dynmo.decide import Decider
from megatron_dynmo.elasticity import Elasticity
from megatron_dynmo.errors import LayoutError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.migrator import MigrationReport, Migrator, MoveRefused
from megatron_dynmo.observer import Observer
from megatron_dynmo.plan import MigrationPlan, build_plan
from megatron_dynmo.profile_report import ProfileReport
from megatron_dynmo.reporter import Reporter
from megatron_dynmo.transport import Transport
from megatron_dynmo.trigger import Decision

logger = logging.getLogger(__name__)

LATE_TAG = 1  # beside Megatron's own messages in the pipeline group, which have none
LATE_CHUNK_BYTES = 2**20  # these wait behind each other on one wire


class Session:
    """The parts that follow one run.

    Args:
        config: the settings.
        run: a `MegatronRun`.
        consensus: agreement over all ranks of the world.
        form_groups: makes all process groups anew; None where the script makes them itself.

    Attributes:
        layout: in force.
        observer: measures.
        reporter: tells.
        consensus: see above.
        elasticity: packs the run and takes ranks back; None where that is off.
    """

    def __init__(
        self, config: DynMoConfig, run: Any, consensus: Consensus, form_groups: Any
    ) -> None:
        topology = run.topology
        self._config = config
        self._run = run
        self._can_move = config.mode == "balance" and topology.pp_size > 1
        if self._can_move or config.forced_moves:
            run.check_movable(config)
        # Who forces layouts wants exactly those; what the balancer would do is still reported.
        is_forced = bool(config.forced_moves or config.forced_packs)
        self._moves_by_itself = self._can_move and not is_forced
        self._forced = [m for m in config.forced_moves if m.iteration > run.first_iteration]
        self.layout: LayerLayout = run.stage.layout
        self.observer = Observer(run, run.make_clock(), config.window)
        self.reporter = Reporter(run, config)
        self.consensus = consensus
        memory = run.device_memory_bytes
        self._device_memory = None if memory is None else consensus.least(memory)
        # Saved between what was asked for and its being done.
        unmade = [m for m in config.forced_moves if m.iteration == run.first_iteration]
        is_unmade = config.overlap_moves and bool(unmade)
        self._due = run.parse_layout(unmade[0].layout) if is_unmade else None
        self._following: tuple[int, MigrationPlan] | None = None
        self._follow_pipeline(run.first_iteration)
        self._has_learned = False
        self._has_reformed = False
        self._latest: ProfileReport | None = None
        self._layer_rng = run.make_layer_rng() if config.layer_rng else None
        self.reporter.say(
            f" dynmo {config.mode} | {run.num_layers} layers on {topology.pp_size} stages"
            f" x {topology.virtual_stages} | layout {self.layout}"
            + (f" | {', '.join(config.dynamics).replace('_', ' ')}" if config.dynamics else "")
            + (f" | events in {config.log_dir}" if config.log_dir else "")
            + f" | rank {topology.world_size - 1} speaks"
        )
        if run.first_iteration:
            self.reporter.resumed(run.first_iteration, run.counters())
        self.elasticity: Elasticity | None = None
        if topology.pp_size > 1 and (config.pack != "off" or config.packs):
            self.elasticity = Elasticity(config, run, self, form_groups, self._decider.memory_limit)

    def _follow_pipeline(self, iteration: int) -> None:
        """Decide for and move layers between the stages that there are now."""
        run, topology = self._run, self._run.topology
        self._decider = Decider(self._config, run, self.layout, self._device_memory, iteration)
        self._migrator = Migrator(
            topology.pp_rank,
            run.stage,
            self._transport(),
            self.consensus,
            self._transport(tag=LATE_TAG, chunk_bytes=LATE_CHUNK_BYTES),
        )

    def _transport(self, **options: int) -> Transport:
        run, topology = self._run, self._run.topology
        return Transport(
            topology.pp_group,
            topology.pp_global_ranks,
            run.device,
            timeout_s=run.timeout_s,
            **options,
        )

    def regrouped(self, iteration: int, layout: LayerLayout) -> None:
        """Go on with other stages.

        Args:
            iteration: last one completed.
            layout: in force on them.
        """
        self.layout = layout
        self._due = None
        self._forced = [move for move in self._forced if move.iteration > iteration]
        self._latest = None
        self._follow_pipeline(iteration)
        self.observer.attach()

    def present_costs(self, iteration: int) -> tuple[ModelCosts, tuple[float, ...]] | None:
        """See `Trigger.present_costs`."""
        return self._decider.present_costs(iteration)

    def begin_iteration(self, iteration: int) -> None:
        """See `Controller.begin_iteration`."""
        if self.elasticity is not None:
            self.elasticity.act(iteration - 1)
        if self._due is not None:
            self.move(iteration - 1, self._due, overlap=True)
        if self._layer_rng is not None:
            self._layer_rng.begin_iteration(iteration)
        self._run.begin_dynamics(iteration)
        self.observer.begin_iteration()

    def measure(self, iteration: int, losses: dict[str, Any], grad_norm: Any) -> None:
        """Take the times, losses and gradient norm of an iteration that has ended."""
        iteration_ms = self.observer.end_iteration(iteration)
        self.reporter.iteration(iteration, iteration_ms, losses, grad_norm)

    def change(self, iteration: int, grad_norm: Any) -> bool:
        """Let the dynamics act, and tell what they changed to the log and to the trigger.

        Returns:
            Whether expected costs changed.
        """
        changes = self._run.change(iteration, grad_norm)
        for kind, what in changes.events:
            self.reporter.dynamics(iteration, kind, what)
        self._decider.announce(iteration + 1, changes.hints)
        self._has_reformed |= changes.has_reformed
        return bool(changes.hints)

    def balance(self, iteration: int, has_changed: bool) -> None:
        """At the end of a window, or when the dynamics changed the costs: decide and move."""
        is_early = has_changed and self._latest is not None and self._decider.is_due(iteration)
        if self.observer.is_window_full or is_early:
            self._decide(iteration)
        if self._has_reformed:
            # Other parameters: measured bytes are out of date, and buffers are cold again.
            self.observer.attach()
        self._has_reformed = False

    def _decide(self, iteration: int) -> None:
        reports = self.observer.collect()
        if reports:
            self._latest = reports[-1][1]
            self.reporter.profile(iteration, self._latest, self.layout)
        latest = self._latest
        assert latest is not None
        if self._run.topology.pp_size == 1:
            return
        self._has_learned = True
        decision = self._agreed(self._decider.decide(iteration, reports))
        is_advice = decision.is_move and not self._moves_by_itself
        told = replace(decision, action="advise") if is_advice else decision
        self.reporter.decision(iteration, told, latest)
        if not decision.is_move and self.elasticity is not None:
            self.elasticity.consider(iteration, latest.iteration_ms)
        if is_advice or not decision.is_move:
            return
        try:
            self._run.check_layout(decision.new)
        except LayoutError as error:
            self._decider.refused(iteration, decision.new, str(error))
            return
        self._move_when_due(iteration, decision.new)

    def remember(self) -> None:
        """Have what was learned in the next checkpoint, if that differs from the last."""
        if self._has_learned and self._due is None:
            self._decider.remember()
            self._has_learned = False

    def _agreed(self, decision: Decision) -> Decision:
        """The decision of rank 0.

        All ranks decide from the same numbers, so they agree; but a rank that rounds differently
        must not start the next iteration while the others move.
        """
        boundaries = self.consensus.of_rank_0(decision.new.boundaries)
        if boundaries == decision.new.boundaries:
            return decision
        new = self.layout.with_boundaries(boundaries)
        logger.warning("this rank would have chosen %s; rank 0 chose %s", decision.new, new)
        action = "stay" if new == self.layout else "move"
        return Decision(action, "as rank 0 decided", self.layout, new)

    def force(self, iteration: int) -> bool:
        """Move to a layout that the user asked for, if it is time; it was checked before training.

        An iteration that Megatron skips is made up for in the next one.
        """
        due = [move for move in self._forced if move.iteration <= iteration]
        if not due:
            return False
        self._forced = self._forced[len(due) :]
        self._move_when_due(iteration, self._run.parse_layout(due[-1].layout))
        return True

    def _move_when_due(self, iteration: int, new: LayerLayout) -> None:
        """Move now; where state may follow, as the next iteration begins.

        By then a checkpoint is saved and evaluation is over: nobody else reads the optimizer's
        state until the iteration has computed its gradients.
        """
        if self._config.overlap_moves and iteration < self._run.train_iters:
            self._due = new
        else:
            self.move(iteration, new)

    def report(self, iteration: int) -> None:
        """Write digests and counters, and the live line, where they are due."""
        interval = self._config.digest_interval
        if interval and iteration % interval == 0:
            self.reporter.digest(iteration, self._run.digests())
        self.reporter.counters(iteration, self._run.counters())
        self.reporter.live(iteration, self.layout)

    def move(self, iteration: int, new: LayerLayout, *, overlap: bool = False) -> bool:
        """Move to a layout; False where that failed before anything changed.

        Args:
            iteration: last one completed.
            new: the layout.
            overlap: see `Migrator.migrate`.

        Collective:
            All ranks of the world.
        """
        old = self.layout
        self._due = None
        if new == old:
            return True
        try:
            plan = build_plan(old, new)
            report = self._migrator.migrate(plan, overlap=overlap)
        except MoveRefused as refusal:
            self.reporter.warn(f" dynmo iteration {iteration:6d} | {refusal}")
            self._decider.refused(iteration, new, str(refusal))
            return False
        self.layout = new
        self.observer.attach()
        self._has_reformed = False
        if self._layer_rng is not None:
            self._layer_rng.attach(self._run.model)
        if overlap:
            self._following = iteration, plan
        else:
            self._moved(iteration, plan, report)
        return True

    def land(self) -> None:
        """Wait for what followed the layers of the last move, if anything did."""
        if self._following is None:
            return
        iteration, plan = self._following
        self._following = None
        self._moved(iteration, plan, self._migrator.land())

    def _moved(self, iteration: int, plan: MigrationPlan, report: MigrationReport) -> None:
        """Take note of a move that is complete."""
        report = self._run.moved(plan, report)
        self._decider.moved(iteration, plan.new, report)
        self._has_learned = True
        self.reporter.migration(iteration, plan.old, plan.new, report)

"""Packs a run to fewer stages and takes them back: when, in which order, and what is said.

Tier: torch, not Megatron. Everything happens before an iteration begins, so that what Megatron does
at the end of the last one, such as logging or saving, involves the ranks that trained it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.elastic.managers import NodeChange
from megatron_dynmo.elastic.meeting import Go, Host, Parked
from megatron_dynmo.elastic.packing import Packing, PackingSettings, advice, find_packing
from megatron_dynmo.elastic.release import NodeRelease
from megatron_dynmo.elastic.stages import spread, without_empty
from megatron_dynmo.errors import BalanceError, ConfigError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.leaving import LeavesTraining

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0  # for parked ranks to say that they are there
_FIRST_COST_ITERATIONS = 10  # that a change is thought to cost before one was made
_FIRST_PAUSE_WINDOWS = 20  # before a manager that refused a restart is asked again; then twice that
_RESTART_COST_MS = 600_000.0  # waiting in the queue, starting and loading: what a guess can say


@dataclass(frozen=True)
class _Change:
    """Stages to go on with, and the layout on them."""

    stages: tuple[int, ...]
    layout: LayerLayout


class Elasticity:
    """Packs one run and takes ranks back.

    Args:
        config: the settings.
        run: a `MegatronRun`.
        session: the controller's; moves layers and follows the run as it becomes.
        form_groups: makes all process groups anew; None where the script makes them itself.
        memory_limit: bytes that a stage may hold; None for no limit.

    Raises:
        ConfigError: Ranks of this run cannot be packed away, though that is asked for.

    Collective:
        All ranks of the world.
    """

    def __init__(
        self,
        config: DynMoConfig,
        run: Any,
        session: Any,
        form_groups: Any,
        memory_limit: float | None,
    ) -> None:
        self._config = config
        self._run = run
        self._session = session
        layout = session.layout
        if config.packs and layout.mtp_num_layers and layout.mtp_chunk != layout.num_chunks - 1:
            raise ConfigError(
                f"the layout {layout} has its MTP layers before the last stage, whose stage could "
                "not be packed away; put m before L, or use --dynmo-pack advise"
            )
        for pack in config.forced_packs:
            if pack.num_stages > layout.num_stages:
                raise ConfigError(
                    f"--dynmo-force-pack asks for {pack.num_stages} stages after iteration "
                    f"{pack.iteration}, the run has {layout.num_stages}"
                )
        self._members = run.make_membership(
            form_groups,
            packs=config.packs,
            by_node=config.job_manager != "none",
            restarts=config.restarts,
        )
        world = self._members.world
        self._host = Host(world.store, world.rank == 0)
        self._stages = self._members.stage_map
        self._release = NodeRelease(config, self._host, session.reporter, world.rank == 0)
        self._settings = PackingSettings(
            config.pack_max_slowdown_pct, config.min_stages, memory_limit
        )
        self._forced = [p for p in config.forced_packs if p.iteration > run.first_iteration]
        self._active: tuple[int, ...] = tuple(range(layout.num_stages))
        self._gone: set[int] = set()  # stages whose ranks have exited, or do not answer
        self._pause = 0  # windows until a restart may be asked for
        self._next_pause = _FIRST_PAUSE_WINDOWS
        self._speeds = [1.0] * layout.num_stages
        self._advised: tuple[int, ...] | None = None
        self._change: _Change | None = None
        self._cost_ms: float | None = None
        self._arrival: tuple[Go, Callable[[], None]] | None = None
        self._last = run.first_iteration

    # ---------------------------------------------------------------- deciding

    def consider(self, iteration: int, iteration_ms: float) -> None:
        """After a decision to leave the layout as it is: would other stages do?

        Args:
            iteration: 1-based number of the iteration that ended.
            iteration_ms: measured.

        Collective:
            All ranks that train.
        """
        if self._config.pack == "off" or self._config.forced_packs:
            return
        self._pause = max(0, self._pause - 1)
        found = self._find(iteration)
        if found is None:
            self._advised = None
            return
        text = advice(
            found, self._active, self._stages, iteration_ms, self._run.train_iters - iteration
        )
        is_confirmed = found.stages == self._advised
        if not is_confirmed:
            self._say(iteration, "advise", text, found)
        elif self._packs_by_itself and self._pays(found, iteration, iteration_ms):
            self._say(iteration, "pack", text, found)
            self._change = _Change(found.stages, found.layout)
        self._advised = found.stages

    @property
    def _packs_by_itself(self) -> bool:
        """Who forces layouts wants exactly those, on the stages that there are."""
        return self._config.pack == "on" and not self._config.forced_moves

    @property
    def _may_restart(self) -> bool:
        return self._config.restarts and self._pause == 0

    def _find(self, iteration: int) -> Packing | None:
        measured = self._session.present_costs(iteration)
        if measured is None:
            return None
        costs, speeds = measured
        for stage, speed in zip(self._active, speeds, strict=True):
            self._speeds[stage] = speed
        # Without those that cannot come; if these alone would do, that is still worth saying.
        gone = frozenset() if self._may_restart else frozenset(self._gone)
        found = None
        try:
            for missing in dict.fromkeys((gone, frozenset[int]())):
                found = find_packing(
                    costs, self._session.layout, self._active, self._stages, self._settings,
                    self._speeds, missing,
                )  # fmt: skip
                if found is not None:
                    break
        except (BalanceError, ConfigError) as error:
            logger.debug("no packing: %s", error)
        return self._agreed(found)

    def _agreed(self, found: Packing | None) -> Packing | None:
        """What rank 0 found: all find the same, but for a rank that rounds differently."""
        layout = self._session.layout
        num_stages = self._stages.num_stages
        boundaries = found.layout.boundaries if found else []
        padding = [-1] * (num_stages * layout.virtual_stages + 1 - len(boundaries))
        mask = [int(found is not None and s in found.stages) for s in range(num_stages)]
        agreed = self._session.consensus.of_rank_0([*mask, *boundaries, *padding])
        stages = tuple(s for s in range(num_stages) if agreed[s])
        if not stages:
            return None
        new = LayerLayout.from_boundaries(
            [b for b in agreed[num_stages:] if b >= 0],
            num_stages=len(stages),
            virtual_stages=layout.virtual_stages,
            mtp_num_layers=layout.mtp_num_layers,
        )
        if found is not None and (found.stages, found.layout) == (stages, new):
            return found
        return Packing(stages, new, found.iteration_ms if found else 0.0, 0.0)

    def _pays(self, found: Packing, iteration: int, iteration_ms: float) -> bool:
        """Whether the rest of training is long enough; rank 0 decides, by the times it measured."""
        pays = self._would_pay(found, iteration, iteration_ms)
        return bool(self._session.consensus.of_rank_0([int(pays)])[0])

    def _would_pay(self, found: Packing, iteration: int, iteration_ms: float) -> bool:
        remaining = self._run.train_iters - iteration
        cost_ms = self._cost_ms or _FIRST_COST_ITERATIONS * iteration_ms
        if len(found.stages) < len(self._active):
            share = 1 - len(found.stages) / len(self._active)
        else:
            share = max(0.0, 1 - found.iteration_ms / iteration_ms)
            if self._gone & set(found.stages):
                if not self._may_restart:
                    return False  # they cannot come
                cost_ms = _RESTART_COST_MS
        return bool(remaining * iteration_ms * share > cost_ms)

    def _say(self, iteration: int, action: str, text: str, found: Packing) -> None:
        hint = ""
        if action == "advise" and self._gone & set(found.stages) and not self._config.restarts:
            hint = "; their ranks are gone: start the run again with all of them"
        elif action == "advise" and self._config.pack != "on":
            hint = "; --dynmo-pack on does it"
        self._session.reporter.packing(
            iteration, action, text + hint, self._session.layout, found.layout, found.iteration_ms
        )

    def _due(self, iteration: int) -> _Change | None:
        """What was decided, or what the user asked for."""
        due = [pack for pack in self._forced if pack.iteration <= iteration]
        if not due:
            change, self._change = self._change, None
            return change
        self._forced = self._forced[len(due) :]
        stages = self._with_count(due[-1].num_stages)
        old = self._session.layout
        layout = LayerLayout.nearly_even(
            old.num_layers, len(stages), virtual_stages=old.virtual_stages,
            mtp_num_layers=old.mtp_num_layers,
        )  # fmt: skip
        return _Change(stages, layout) if stages != self._active else None

    def _with_count(self, num_stages: int) -> tuple[int, ...]:
        """So many stages: late ones of the middle leave first, and early ones come first."""
        last = self._stages.num_stages - 1
        middle = [s for s in self._active if 0 < s < last]
        away = (s for s in range(1, last) if s not in middle)
        middle += [s for s in away if self._config.restarts or s not in self._gone]
        return (0, *sorted(middle[: num_stages - 2]), last)

    # ---------------------------------------------------------------- doing

    def act(self, iteration: int) -> None:
        """Before an iteration: carry out what is due.

        Args:
            iteration: last one completed.

        Raises:
            LeavesTraining: This rank was packed away.
            MigrationError: A move failed after its point of no return.

        Collective:
            All ranks that train, and those that come back.
        """
        self._last = iteration
        if self._arrival is not None:
            self._arrive(iteration)
            return
        self._release.follow(iteration)
        change = self._due(iteration)
        if change is None:
            return
        started = time.perf_counter()
        if set(change.stages) < set(self._active):
            self._pack(iteration, change)
        elif self._gone & set(change.stages):
            self._restart(iteration, change)
            return
        else:
            self._take_back(iteration, change)
        self._learn_cost((time.perf_counter() - started) * 1e3)

    def _learn_cost(self, duration_ms: float) -> None:
        """What a change took on the slowest rank; real time says nothing where time is virtual."""
        if not self._run.is_emulated:
            self._cost_ms = self._session.consensus.slowest(duration_ms)

    def _pack(self, iteration: int, change: _Change) -> None:
        """Hand over layers and state, then go on without the others."""
        active, session = self._active, self._session
        freed = [stage for stage in active if stage not in change.stages]
        places = [active.index(stage) for stage in change.stages]
        full = spread(change.layout, places, len(active))
        if not session.move(iteration, full):
            self._advised = None
            return
        exits = self._release.may_exit(iteration, session.consensus)
        ranks = self._members.ranks_of(freed)
        if self._members.stage in freed:
            self._leave(exits)
        self._members.regroup(change.stages, without_empty(full, places))
        self._go_on(iteration, change.stages, change.layout)
        nodes = self._members.nodes_of(ranks)
        session.reporter.elastic(iteration, "pack", ranks, nodes)
        if not exits:
            session.reporter.elastic(iteration, "park", ranks, nodes)
            return
        self._gone |= set(freed)
        freed_nodes = self._stages.freed_nodes(change.stages)
        kept_nodes = self._stages.kept_nodes(change.stages)
        self._release.begin(
            NodeChange(iteration, ranks, freed_nodes, kept_nodes), self._members.world.generation
        )

    def _leave(self, exits: bool) -> None:
        self._members.leave()
        world = self._members.world
        parked = Parked(world.store, world.rank, self._host.message)
        if exits:
            parked.leave(world.generation)
            raise LeavesTraining(lambda: None)
        raise LeavesTraining(parked.wait)

    def _take_back(self, iteration: int, change: _Change) -> None:
        """Call parked ranks, and if all are there, go on with them."""
        session, host = self._session, self._host
        back = [stage for stage in change.stages if stage not in self._active]
        ranks = self._members.ranks_of(back)
        places = [change.stages.index(stage) for stage in self._active]
        full = spread(session.layout, places, len(change.stages))
        unheard = host.call(ranks, _ANSWER_S)
        is_missing = session.consensus.of_rank_0([int(rank in unheard) for rank in ranks])
        if any(is_missing):
            host.off()
            missing = [rank for rank, missed in zip(ranks, is_missing, strict=True) if missed]
            session.reporter.warn(
                f" dynmo iteration {iteration:6d} | parked ranks {missing} do not answer: "
                f"training goes on with {len(self._active)} stages"
            )
            self._gone |= {s for s in back if set(self._members.ranks_of([s])) & set(missing)}
            self._advised = None
            return
        host.go(
            {
                "iteration": iteration,
                "stages": change.stages,
                "layout": full.boundaries,
                "target": change.layout.boundaries,
                "gone": sorted(self._gone),
                **self._members.progress(),
            }
        )
        self._widen(iteration, change, full)
        session.reporter.elastic(iteration, "rejoin", ranks, self._members.nodes_of(ranks))

    def _restart(self, iteration: int, change: _Change) -> None:
        """Have the run started anew with all its nodes: ranks that have exited cannot come."""
        self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
        num_nodes = len(self._stages.kept_nodes(range(self._stages.num_stages)))
        ranks = self._members.ranks_of([s for s in change.stages if s not in self._active])
        hosts = self._members.nodes_of(ranks)
        if self._release.may_restart(iteration, ranks, hosts, num_nodes, self._session.consensus):
            self._run.save_and_end()

    def come_back(self, go: Go, arrived: Callable[[], None]) -> None:
        """On a parked rank: be as far as the others, and meet them before the next iteration.

        Args:
            go: what they said.
            arrived: called when this rank trains with them again.
        """
        self._members.take_over(go.state)
        self._arrival = go, arrived

    def _arrive(self, iteration: int) -> None:
        assert self._arrival is not None
        go, arrived = self._arrival
        self._arrival = None
        arrived()
        state = go.state
        assert state["iteration"] == iteration, (state["iteration"], iteration)
        self._host.message = go.message
        self._forced = [pack for pack in self._forced if pack.iteration > iteration]
        self._gone = set(state["gone"])
        stages = tuple(state["stages"])
        old = self._session.layout
        full, target = (
            LayerLayout.from_boundaries(
                state[name],
                num_stages=len(stages),
                virtual_stages=old.virtual_stages,
                mtp_num_layers=old.mtp_num_layers,
            )
            for name in ("layout", "target")
        )
        self._widen(iteration, _Change(stages, target), full)
        self._learn_cost(0.0)

    def _widen(self, iteration: int, change: _Change, full: LayerLayout) -> None:
        self._members.regroup(change.stages, full)
        self._go_on(iteration, change.stages, full)
        self._session.move(iteration, change.layout)

    def _go_on(self, iteration: int, stages: tuple[int, ...], layout: LayerLayout) -> None:
        self._active = stages
        self._advised = self._change = None
        self._session.regrouped(iteration, layout)

    def end(self) -> None:
        """Training is over: let parked ranks go."""
        self._host.end()
        self._release.end(self._last)

"""With how few pipeline stages training is as fast: a pure decision, the same on every rank.

Stages are named by the pp_rank they had when the run began; those that carry on are the *active*
ones. A stage can be freed when no node that it runs on is needed by another one, so stages that
share nodes leave together, and the first and the last stage never do.

Candidates form a chain: the active stages, fewer and fewer of them, and more and more of those that
were freed. The fewest stages win whose best layout fits into memory and takes at most
`max_slowdown_pct` longer than the best one on all stages; a run comes back only when it is slower
than that by `_BAND_PCT` more. A plan counts only if the next check, on the same costs, would keep
it: so packing never undoes itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_dynmo.balancers import choose_layout, min_max_layout
from megatron_dynmo.balancers.prediction import SplitPredictions
from megatron_dynmo.cost import ModelCosts, predict_layout_ms
from megatron_dynmo.errors import BalanceError, ConfigError
from megatron_dynmo.layout import LayerLayout

__all__ = ["Packing", "PackingSettings", "StageMap", "advice", "find_packing"]

_BAND_PCT = 2.0
_MAX_WORK = 1e7  # see `choose_layout`: a few ms


@dataclass(frozen=True)
class PackingSettings:
    """What may be set.

    Attributes:
        max_slowdown_pct: longest predicted iteration, against all stages.
        min_stages: fewest stages.
        stage_memory_limit: bytes of a stage, activations in flight included; None for no limit.
    """

    max_slowdown_pct: float = 2.0
    min_stages: int = 2
    stage_memory_limit: float | None = None


@dataclass(frozen=True)
class StageMap:
    """Where the stages run that the job began with.

    Attributes:
        nodes: node names of every stage; empty sets where nodes do not matter.
        ranks_per_stage: ranks that leave with a stage.
    """

    nodes: tuple[frozenset[str], ...]
    ranks_per_stage: int = 1

    @property
    def num_stages(self) -> int:
        """Stages at the start."""
        return len(self.nodes)

    def units(self) -> list[frozenset[int]]:
        """Sets of stages that can only be freed together, in pipeline order."""
        units: list[tuple[frozenset[int], frozenset[str]]] = []
        for stage, nodes in enumerate(self.nodes):
            touching = [unit for unit in units if unit[1] & nodes]
            units = [unit for unit in units if unit not in touching]
            units.append(
                (
                    frozenset({stage}).union(*(stages for stages, _ in touching)),
                    nodes.union(*(names for _, names in touching)),
                )
            )
        ends = {0, self.num_stages - 1}
        return sorted((stages for stages, _ in units if not stages & ends), key=min)

    def freed_nodes(self, active: Sequence[int]) -> tuple[str, ...]:
        """Nodes on which no active stage runs, sorted."""
        kept = set(self.kept_nodes(active))
        return tuple(sorted(set().union(*self.nodes) - kept))

    def kept_nodes(self, active: Sequence[int]) -> tuple[str, ...]:
        """Nodes on which an active stage runs, in pipeline order."""
        return tuple(dict.fromkeys(name for stage in active for name in sorted(self.nodes[stage])))


@dataclass(frozen=True)
class Packing:
    """A number of stages to go on with.

    Attributes:
        stages: the active stages, ascending.
        layout: best layout on them.
        iteration_ms: predicted.
        slowdown_pct: against all stages; negative where fewer are faster.
    """

    stages: tuple[int, ...]
    layout: LayerLayout
    iteration_ms: float
    slowdown_pct: float


def find_packing(
    costs: ModelCosts,
    layout: LayerLayout,
    active: Sequence[int],
    stage_map: StageMap,
    settings: PackingSettings,
    stage_speeds: Sequence[float] | None = None,
    gone: frozenset[int] = frozenset(),
) -> Packing | None:
    """Find other stages to go on with.

    Args:
        costs: of the model, on a rank of speed 1.
        layout: in force, on the active stages.
        active: stages that carry on now, ascending.
        stage_map: where all stages run.
        settings: what the user set.
        stage_speeds: relative speed of every stage of the map, of freed ones as last known; equal
            when None.
        gone: freed stages that cannot come back. Where the others are not enough, all of them are
            to come if that is faster than now.

    Returns:
        The stages to go on with; None when the present ones are right. Fewer than now are to be
        packed to, more to be taken back.

    Raises:
        BalanceError: No layout fits into memory even on all stages.
        ConfigError: The micro-batches do not suit the schedule on all stages.
    """
    if not stage_map.units():
        return None
    speeds = tuple(stage_speeds or (1.0,) * stage_map.num_stages)
    search = _Search(costs, layout, stage_map, settings, speeds, gone)
    best = None
    seen = [tuple(active)]
    while (found := search.step(seen[-1])) is not None:
        if found.stages in seen:
            return None  # no plan would last
        seen.append(found.stages)
        best = found
    if best is None or (set(best.stages) - set(active) and set(active) - set(best.stages)):
        return None  # the latter would be an exchange of stages
    is_fewer = len(best.stages) < len(active)
    plan = search.confirmed(best, is_fewer)
    if plan is None or is_fewer or plan.slowdown_pct <= settings.max_slowdown_pct:
        return plan
    # The schedule itself takes longer than the estimate that found these: all come back that can.
    most = search.most(tuple(active))
    return plan if most is None else search.confirmed(most, is_fewer=False)


class _Search:
    """Predictions for sets of stages, each made once."""

    def __init__(
        self,
        costs: ModelCosts,
        layout: LayerLayout,
        stage_map: StageMap,
        settings: PackingSettings,
        speeds: tuple[float, ...],
        gone: frozenset[int],
    ) -> None:
        self._costs, self._layout = costs, layout
        self._map, self._settings, self._speeds = stage_map, settings, speeds
        self._gone = gone
        self._known: dict[tuple[int, ...], Packing | None] = {}
        everything = tuple(range(stage_map.num_stages))
        self._whole = self._min_max(everything)
        self._all_ms = self._estimate_ms(self._whole, everything)
        self._known[everything] = Packing(everything, self._whole, self._all_ms, 0.0)

    def step(self, active: tuple[int, ...]) -> Packing | None:
        """What to do next from these stages; None when they are right."""
        limit = self._settings.max_slowdown_pct
        fewer = list(self._fewer(active))[::-1]
        # Fewer stages are slower, but for a few that make a shorter pipeline; those are enough too.
        first = bisect_left(fewer, True, key=lambda stages: self._look(stages, limit) is not None)
        if first < len(fewer):
            return self._look(fewer[first], limit)
        if self._look(active, limit + _BAND_PCT) is not None:
            return None
        found = next(filter(None, (self._look(s, limit) for s in self._more(active))), None)
        return found or self._faster(active)

    def most(self, active: tuple[int, ...]) -> Packing | None:
        """All stages that can come, however fast; None if there is none, or none that fits."""
        *_, most = (active, *self._more(active))
        return None if most == active else self._look(most, inf)

    def _faster(self, active: tuple[int, ...]) -> Packing | None:
        """All stages that can come, where that is faster than these; for when some are gone."""
        most, present = self.most(active), self._look(active, inf)
        if most is None or present is None:
            return most
        return most if most.slowdown_pct + _BAND_PCT < present.slowdown_pct else None

    def confirmed(self, packing: Packing, is_fewer: bool) -> Packing | None:
        """The same stages with the best layout, by the schedule itself; None if it is too slow."""
        stages, layout = packing.stages, packing.layout
        everything = tuple(range(self._map.num_stages))
        try:
            all_ms = predict_layout_ms(
                self._costs, self._whole, stage_speeds=self._speeds_of(everything)
            )
            choice = choose_layout(
                self._costs, len(stages), virtual_stages=layout.virtual_stages,
                stage_speeds=self._speeds_of(stages),
                stage_memory_limit=self._settings.stage_memory_limit,
                min_layers=int(layout.num_layers >= layout.num_chunks), max_work=_MAX_WORK,
            )  # fmt: skip
            layout = layout.with_boundaries(choice.layout.boundaries)
            iteration_ms = choice.iteration_ms
            if iteration_ms is None or _parts_mtp(layout):
                layout = packing.layout
                iteration_ms = predict_layout_ms(
                    self._costs, layout, stage_speeds=self._speeds_of(stages)
                )
        except ConfigError:
            return None  # the micro-batches do not suit the interleaved schedule
        slowdown = 100 * (iteration_ms / all_ms - 1) if all_ms > 0 else 0.0
        if is_fewer and slowdown > self._settings.max_slowdown_pct:
            return None
        return Packing(stages, layout, iteration_ms, slowdown)

    def _fewer(self, active: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The active stages without more and more of them, slow ones first, then late ones."""
        units = [unit for unit in self._map.units() if unit <= set(active)]
        left = set(active)
        for unit in sorted(units, key=self._worth):
            left -= unit
            if len(left) >= self._settings.min_stages:
                yield tuple(sorted(left))

    def _more(self, active: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The active stages with more and more of the others."""
        units = [unit for unit in self._map.units() if not unit & {*active, *self._gone}]
        held = set(active)
        for unit in sorted(units, key=self._worth, reverse=True):
            held |= unit
            yield tuple(sorted(held))

    def _worth(self, unit: frozenset[int]) -> tuple[float, int]:
        return min(self._speeds[stage] for stage in unit), -min(unit)

    def _look(self, stages: tuple[int, ...], limit_pct: float) -> Packing | None:
        """A set of stages if it is fast enough and everything fits."""
        if stages not in self._known:
            self._known[stages] = self._packing(stages)
        known = self._known[stages]
        return known if known is not None and known.slowdown_pct <= limit_pct else None

    def _packing(self, stages: tuple[int, ...]) -> Packing | None:
        try:
            layout = self._min_max(stages)
            iteration_ms = self._estimate_ms(layout, stages)
        except (BalanceError, ConfigError):
            return None  # too much for their memory, or for the interleaved schedule
        slowdown = 100 * (iteration_ms / self._all_ms - 1) if self._all_ms > 0 else 0.0
        return Packing(stages, layout, iteration_ms, slowdown)

    def _min_max(self, stages: tuple[int, ...]) -> LayerLayout:
        old = self._layout
        empty = LayerLayout.nearly_even(
            old.num_layers, len(stages), virtual_stages=old.virtual_stages,
            mtp_num_layers=old.mtp_num_layers,
        )  # fmt: skip
        found = min_max_layout(
            self._costs, len(stages), virtual_stages=old.virtual_stages,
            stage_speeds=self._speeds_of(stages),
            stage_memory_limit=self._settings.stage_memory_limit,
            min_layers=int(old.num_layers >= empty.num_chunks),
        )  # fmt: skip
        layout = empty.with_boundaries(found.boundaries)
        if _parts_mtp(layout):
            raise BalanceError(f"{layout} parts the MTP block from the last layer")
        return layout

    def _estimate_ms(self, layout: LayerLayout, stages: tuple[int, ...]) -> float:
        """The longest chains of passes that wait for each other: near the schedule, and quick."""
        schedule = "1f1b" if layout.virtual_stages == 1 else "interleaved"
        splits = SplitPredictions(
            self._costs, len(stages), layout.virtual_stages, self._speeds_of(stages), schedule
        )
        return float(splits.at_least_ms(np.array([layout.chunk_boundaries], dtype=np.intp))[0])

    def _speeds_of(self, stages: tuple[int, ...]) -> list[float]:
        return [self._speeds[stage] for stage in stages]


def _parts_mtp(layout: LayerLayout) -> bool:
    """Whether the last layer is not with the MTP block that hangs on it."""
    return bool(layout.mtp_num_layers) and layout.owner_of(layout.num_layers) != layout.mtp_owner


def advice(
    packing: Packing,
    active: Sequence[int],
    stage_map: StageMap,
    iteration_ms: float,
    remaining_iterations: int,
) -> str:
    """Say in one line what other stages would bring.

    Args:
        packing: what was found.
        active: stages that carry on now.
        stage_map: where all stages run.
        iteration_ms: measured, under the layout in force.
        remaining_iterations: to come.
    """
    change = f"{packing.slowdown_pct:+.1f} % iteration time against {stage_map.num_stages} stages"
    if len(packing.stages) > len(active):
        back = [stage for stage in packing.stages if stage not in active]
        return f"{len(packing.stages)} stages are needed again: {change}; stages {back} come back"
    freed = [stage for stage in active if stage not in packing.stages]
    num_ranks = len(freed) * stage_map.ranks_per_stage
    saved = num_ranks * remaining_iterations * iteration_ms / 3.6e6
    nodes = stage_map.freed_nodes(packing.stages)
    return (
        f"{len(packing.stages)} of {len(active)} stages suffice ({change}): frees stages {freed}, "
        f"{num_ranks} ranks"
        + (f" on {', '.join(nodes)}" if nodes else "")
        + f", and saves {saved:,.3g} GPU-hours over the {remaining_iterations} iterations left"
    )

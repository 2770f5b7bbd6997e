"""From measured windows to a decision: balancer and trigger put together for a run.

Pure arithmetic on numbers that every rank has, so every rank comes to the same answer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import orjson

from megatron_dynmo.balancers import LayoutChoice, choose_layout, diffusion, min_max_layout
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.errors import BalanceError, ConfigError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.migrator import MigrationReport
from megatron_dynmo.profile_report import ProfileReport
from megatron_dynmo.trigger import CostHint, Decision, Trigger, TriggerSettings

logger = logging.getLogger(__name__)

_MAX_WORK = 1e7  # for comparing iteration times in one decision: a few ms
"""See `choose_layout`. All rounds that are needed at 8 stages x 32 micro-batches; at 64 x 64 two or
three, and at 64 x 256 hardly more than the present layout and the min-max one."""


class Decider:
    """Decides for one run.

    Args:
        config: the settings.
        run: a `MegatronRun`, for how long training still goes on and what a stage may hold.
        layout: layout in force at the start.
        device_memory_bytes: memory of the smallest device; None where ranks share it.
        iteration: last one completed; by default that of the start.

    Attributes:
        memory_limit: bytes that a stage may hold; None for no limit.
    """

    def __init__(
        self,
        config: DynMoConfig,
        run: Any,
        layout: LayerLayout,
        device_memory_bytes: float | None = None,
        iteration: int | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._layout = layout
        cap = config.memory_cap_gb
        self.memory_limit = device_memory_bytes if cap is None else cap * 1e9
        settings = dataclasses.replace(
            TriggerSettings.from_config(config), memory_cap_bytes=self.memory_limit
        )
        self._trigger = self._remembering(settings)
        done = run.first_iteration if iteration is None else iteration
        self._trigger.start(layout, done, run.train_iters - done)
        self._choices: list[LayoutChoice] = []

    def decide(self, iteration: int, reports: Sequence[tuple[int, ProfileReport]]) -> Decision:
        """Decide on one window.

        Args:
            iteration: 1-based number of the iteration that ended.
            reports: (iteration, report) of each measured iteration of the window.
        """
        for number, report in reports:
            self._trigger.observe(number, report.costs, report.iteration_ms)
        self._choices.clear()
        try:
            decision = self._trigger.decide(iteration, self._run.train_iters - iteration)
        except ConfigError as error:
            # A schedule that cannot be predicted is no reason to stop training.
            return Decision("stay", f"no prediction: {error}", self._layout, self._layout)
        for choice in self._choices:
            if decision.action == "move" and decision.new == choice.layout != choice.min_max:
                return dataclasses.replace(decision, reason=f"{decision.reason}; {choice.reason}")
        return decision

    def _remembering(self, settings: TriggerSettings) -> Trigger:
        """A trigger that knows what the run knew when its checkpoint was saved."""
        trigger = Trigger(settings, choose=self._choose)
        text = self._run.memory
        if text is None:
            return trigger
        try:
            trigger.restore(orjson.loads(text))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            logger.warning(
                "what the saved run had learned cannot be read (%s: %s); it is learned anew",
                type(error).__name__,
                error,
            )
            return Trigger(settings, choose=self._choose)
        return trigger

    def announce(self, iteration: int, changes: Sequence[tuple[int, float, float]]) -> None:
        """Take note of costs that are about to change.

        Args:
            iteration: the first one with the new costs.
            changes: (layer_number, forward, backward): new time over old time.
        """
        if changes:
            self._trigger.announce(CostHint(iteration, *change) for change in changes)

    def is_due(self, iteration: int) -> bool:
        """Whether a decision is worth taking after this iteration, window full or not."""
        return self._trigger.is_due(iteration)

    def present_costs(self, iteration: int) -> tuple[ModelCosts, tuple[float, ...]] | None:
        """See `Trigger.present_costs`."""
        return self._trigger.present_costs(iteration)

    def remember(self) -> None:
        """Put what decisions rest on where checkpoints take it from; not in the midst of a move."""
        self._run.memory = orjson.dumps(self._trigger.state()).decode()

    def moved(self, iteration: int, layout: LayerLayout, report: MigrationReport) -> None:
        """Take note of a move that was carried out."""
        self._layout = layout
        self._trigger.moved(iteration, layout, report.duration_ms, report.num_bytes)

    def refused(self, iteration: int, layout: LayerLayout, reason: str) -> None:
        """Take note of a move that failed before anything changed."""
        self._trigger.refused(iteration, layout, reason)

    def _choose(
        self, costs: ModelCosts, layout: LayerLayout, speeds: tuple[float, ...]
    ) -> LayerLayout:
        """The layout that the configured balancer proposes."""
        if self._config.balancer == "diffusion":
            weighed = weigh(costs, self._config.weight)
            proposals = [_diffuse(weighed, layout, speeds, self.memory_limit)]
        else:
            proposals = self._partition(costs, layout, speeds)
        for new in proposals:
            if not layout.mtp_num_layers or _last_owner(new) == _last_owner(layout):
                return new
        raise BalanceError(
            f"{proposals[-1]} would move layer {layout.num_layers}, which the MTP block hangs on"
        )

    def _partition(
        self, costs: ModelCosts, layout: LayerLayout, speeds: tuple[float, ...]
    ) -> list[LayerLayout]:
        """The layout with the least predicted iteration time, then the min-max one.

        Comparing iteration times is bounded, so that a decision for 128 layers on 64 stages takes
        a few ms. Beyond that the min-max layout is taken as it is, and so it is where layers weigh
        bytes, of which no iteration time follows.
        """
        num_stages, virtual_stages = layout.num_stages, layout.virtual_stages
        least = _fewest_layers(layout, speeds)
        if self._config.weight != "time":
            weighed = weigh(costs, self._config.weight)
            return [
                min_max_layout(
                    weighed, num_stages, virtual_stages=virtual_stages, stage_speeds=speeds,
                    stage_memory_limit=self.memory_limit, min_layers=least, current=layout,
                )
            ]  # fmt: skip
        choice = choose_layout(
            costs, num_stages, virtual_stages=virtual_stages, stage_speeds=speeds,
            stage_memory_limit=self.memory_limit, min_layers=least, current=layout,
            max_work=_MAX_WORK,
        )  # fmt: skip
        self._choices.append(choice)
        return [choice.layout, choice.min_max]


def weigh(costs: ModelCosts, weight: str) -> ModelCosts:
    """Costs with what a layer weighs in the place of its time.

    Args:
        costs: as measured.
        weight: `time`; `params`, bytes of parameters and optimizer state, which shrink with
            pruning; or `memory`, the activations of a micro-batch too.
    """
    if weight == "time":
        return costs

    def weighed[Part: (LayerCost, ExtraCost)](part: Part) -> Part:
        load = part.memory_bytes + (part.activation_bytes if weight == "memory" else 0)
        return dataclasses.replace(part, forward_ms=float(load), backward_ms=0.0)

    return dataclasses.replace(
        costs,
        layers=tuple(weighed(layer) for layer in costs.layers),
        first_stage_extra=weighed(costs.first_stage_extra),
        last_stage_extra=weighed(costs.last_stage_extra),
    )


def _diffuse(
    costs: ModelCosts, layout: LayerLayout, speeds: Sequence[float], memory_limit: float | None
) -> LayerLayout:
    """Let neighbours hand over boundary layers, from the layout in force."""
    if layout.virtual_stages > 1:
        raise BalanceError(
            "--dynmo-balancer diffusion knows one chunk a rank, this run has "
            f"{layout.virtual_stages}; use --dynmo-balancer partition"
        )
    result = diffusion(
        [layer.total_ms for layer in costs.layers],
        layout.boundaries,
        first_stage_extra=costs.first_stage_extra.total_ms,
        last_stage_extra=costs.last_stage_extra.total_ms,
        stage_speeds=speeds,
        min_layers=_fewest_layers(layout, speeds),
        layer_memory=None if memory_limit is None else [la.memory_bytes for la in costs.layers],
        stage_memory_limit=memory_limit,
    )
    return layout.with_boundaries(result.boundaries)


def _fewest_layers(layout: LayerLayout, speeds: Sequence[float]) -> int:
    """Layers that every chunk keeps: a slow rank without any could not be seen to recover."""
    has_slow_rank = min(speeds) < 1.0
    return int(has_slow_rank and layout.num_layers >= layout.num_chunks)


def _last_owner(layout: LayerLayout) -> tuple[int, int]:
    return layout.owner_of(layout.num_layers)

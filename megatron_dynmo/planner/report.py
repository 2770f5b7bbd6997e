"""The best layout for some costs, what it brings, and what stands in the way of a better one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megatron_dynmo.balancers import choose_layout, min_max_layout
from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.planner.bound import iteration_bound_ms, stage_bound_ms
from megatron_dynmo.planner.layout_report import LayoutReport, report_layout
from megatron_dynmo.planner.question import Question

__all__ = ["MIN_GAIN_PCT", "Plan", "best_layout", "make_plan"]

MIN_GAIN_PCT = 2.0


@dataclass(frozen=True)
class Plan:
    """The best layout found, against the present one.

    Attributes:
        best: the best layout found.
        current: the present layout, or the nearest to even.
        current_name: what the present layout is called.
        lower_bound_ms: iteration time that no layout of whole layers beats.
        stage_bound_ms: time of the slowest rank that none beats.
        reason: why this layout, in one line.
    """

    best: LayoutReport
    current: LayoutReport
    current_name: str
    lower_bound_ms: float
    stage_bound_ms: float
    reason: str

    @property
    def gain_pct(self) -> float:
        """Iteration time saved against the present layout."""
        if self.current.iteration_ms == 0:
            return 0.0
        return 100 * (1 - self.best.iteration_ms / self.current.iteration_ms)

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is worth another layout."""
        return self.gain_pct >= MIN_GAIN_PCT

    def as_json(self) -> dict[str, Any]:
        """The document of `dynmo plan --json`."""
        return self.best.as_json() | {
            "lower_bound_ms": self.lower_bound_ms,
            "stage_lower_bound_ms": self.stage_bound_ms,
            "current": self.current.as_json(),
            "gain_pct": self.gain_pct,
            "advice": "change" if self.is_worth_it else "stay",
            "reason": self.reason,
        }


def best_layout(
    question: Question, current: LayerLayout | None = None, *, is_rough: bool = False
) -> tuple[LayoutReport, str]:
    """The layout with the least predicted iteration time that was found, and why it.

    Args:
        question: what is asked.
        current: the present layout; among equals the nearest to it wins.
        is_rough: take the layout with the fastest slowest rank, without comparing iteration times.

    Raises:
        BalanceError: no layout fits, or the present one has another shape.
        ConfigError: the micro-batches do not suit the schedule.
    """
    cap = question.memory_cap_bytes
    costs = question.costs if question.virtual_stages == 1 else _with_activations_held(question)
    limits: dict[str, Any] = {
        "virtual_stages": question.virtual_stages,
        "stage_memory_limit": None if cap is None else cap - question.transient_bytes,
        "min_layers": question.min_layers,
        "current": current,
    }
    if is_rough:
        chosen, reason = (
            min_max_layout(costs, question.num_stages, **limits),
            "fastest slowest rank",
        )
    else:
        choice = choose_layout(costs, question.num_stages, **limits)
        chosen, reason = choice.layout, choice.reason
    layout = LayerLayout.from_boundaries(
        chosen.boundaries,
        num_stages=question.num_stages,
        virtual_stages=question.virtual_stages,
        mtp_num_layers=question.mtp_layers if current is None else current.mtp_num_layers,
    )
    report = report_layout(question.costs, layout, question.transient_bytes)
    fullest = max(report.ranks, key=lambda rank: rank.memory_bytes)
    if cap is not None and fullest.memory_bytes > cap:
        raise BalanceError(
            f"found no layout that fits in memory: in the best one stage {fullest.pp_rank} needs "
            f"{fullest.memory_bytes:,} bytes, allowed are {cap:,.0f}; use more stages or "
            "recompute activations"
        )
    return report, reason


def make_plan(question: Question, current: LayerLayout | None = None) -> Plan:
    """Find the best layout and say what it brings against the present one, or an even one.

    Raises:
        BalanceError: as `best_layout`.
        ConfigError: as `best_layout`.
    """
    best, reason = best_layout(question, current)
    name, present = "the present layout", current
    if present is None:
        num_layers = len(question.costs.layers)
        chunks = question.num_stages * question.virtual_stages
        name = "the split nearest to even" if num_layers % chunks else "an even split"
        present = LayerLayout.nearly_even(
            num_layers,
            question.num_stages,
            virtual_stages=question.virtual_stages,
            mtp_num_layers=question.mtp_layers,
        )
    # The bounds are sums in another order than the predictions: rounding must not set them above.
    return Plan(
        best,
        report_layout(question.costs, present, question.transient_bytes),
        name,
        min(iteration_bound_ms(question), best.iteration_ms),
        min(stage_bound_ms(question), best.slowest_ms),
        reason,
    )


def _with_activations_held(question: Question) -> ModelCosts:
    """Costs whose memory holds the activations that rank 0 has in flight, the most of all ranks.

    The search over virtual stages knows one number of bytes for each layer and none for the
    extras. These are safe on every rank: the extras' bytes are those of the outer layers.
    """
    costs, stages, virtual = question.costs, question.num_stages, question.virtual_stages
    passes = 2 * (stages - 1) + (virtual - 1) * stages + 1
    held = min(math.ceil(passes / virtual), costs.num_microbatches)

    def size(part: LayerCost | ExtraCost) -> int:
        return part.memory_bytes + held * part.activation_bytes

    sizes = [size(layer) for layer in costs.layers]
    sizes[0] += size(costs.first_stage_extra)
    sizes[-1] += size(costs.last_stage_extra)
    none = {"memory_bytes": 0, "activation_bytes": 0}
    return replace(
        costs,
        layers=tuple(
            replace(layer, memory_bytes=held_bytes, activation_bytes=0)
            for layer, held_bytes in zip(costs.layers, sizes, strict=True)
        ),
        first_stage_extra=replace(costs.first_stage_extra, **none),
        last_stage_extra=replace(costs.last_stage_extra, **none),
    )

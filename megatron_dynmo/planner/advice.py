"""What stands in the way of a better layout, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_dynmo.errors import DynMoError
from megatron_dynmo.planner.layout_report import LayoutReport
from megatron_dynmo.planner.question import Question
from megatron_dynmo.planner.report import MIN_GAIN_PCT, Plan, best_layout

__all__ = ["advice"]

_MAX_VIRTUAL_STAGES = 4
_MAX_CHUNKS = 256  # of suggestions: searching more takes seconds
_NOTICEABLE = 1e-9


def advice(question: Question, plan: Plan, unit: str = "ms") -> list[str]:
    """Findings of one line each, the gravest first; none if there is nothing to say.

    Args:
        question: what was asked.
        plan: the answer.
        unit: of times.
    """
    return [
        *_too_few_microbatches(question),
        *_large_units(question, unit),
        *_granularity(question, plan, unit),
    ]


def _too_few_microbatches(question: Question) -> Iterator[str]:
    number = question.costs.num_microbatches
    if number < question.num_stages and question.num_stages > 1:
        yield (
            f"{number} micro-batch{'es' if number > 1 else ''} on {question.num_stages} stages: "
            "most of the time stages wait for each other, whatever the layout; use more "
            "micro-batches"
        )


def _large_units(question: Question, unit: str) -> Iterator[str]:
    """Parts that cannot be divided and take more than an equal share of the work."""
    costs, mean = question.costs, question.mean_ms
    last = costs.last_stage_extra.total_ms
    extras = {
        "the embedding": (costs.first_stage_extra.total_ms, "use fewer stages"),
        "the output layer with its loss": (
            last * question.output_share,
            "split the vocabulary over more tensor-parallel ranks or use fewer stages",
        ),
    }
    if question.output_share < 1:
        extras["the output layer with MTP"] = (last, "split them over more ranks")
    for name, (time, help_text) in extras.items():
        if time > mean * (1 + _NOTICEABLE):
            yield (
                f"{name} takes {time:.4g} {unit}, more than the mean stage of {mean:.4g} {unit}: "
                f"no layout makes the slowest stage faster than that; {help_text}"
            )
    heavy = [layer for layer in costs.layers if layer.total_ms > mean * (1 + _NOTICEABLE)]
    if heavy:
        layer = max(heavy, key=lambda one: one.total_ms)
        others = f" (and {len(heavy) - 1} more)" if len(heavy) > 1 else ""
        yield (
            f"layer {layer.layer_number}{others} takes {layer.total_ms:.4g} {unit}, more than the "
            f"mean stage of {mean:.4g} {unit}: no layout makes the slowest stage faster than "
            "that; use fewer stages"
        )


def _granularity(question: Question, plan: Plan, unit: str) -> Iterator[str]:
    """Whether whole layers are too coarse for equal stages, and what splits finer."""
    mean = question.mean_ms
    over_pct = 100 * (plan.stage_bound_ms / mean - 1) if mean > 0 else 0.0
    if over_pct < MIN_GAIN_PCT:
        return
    yield (
        f"whole layers leave the slowest stage at least {over_pct:.1f} % above the mean "
        f"({plan.stage_bound_ms:.4g} against {mean:.4g} {unit})"
    )
    better = [found for found in _finer(question) if _is_better(found[1], plan.best)]
    if better:
        text, report = min(better, key=lambda found: found[1].iteration_ms)
        saved = 100 * (1 - report.iteration_ms / plan.best.iteration_ms)
        yield (
            f"{text} would help: {report.layout} takes {report.iteration_ms:.4g} {unit} an "
            f"iteration, {saved:.1f} % less, imbalance {report.imbalance:.1%}, "
            f"bubble {report.bubble_fraction:.1%}"
        )


def _finer(question: Question) -> Iterator[tuple[str, LayoutReport]]:
    """Layouts of finer grain: more virtual stages, or stages without layers."""
    num_layers = len(question.costs.layers)
    others = [
        (
            f"{virtual} virtual stages (--virtual-stages {virtual})",
            replace(question, virtual_stages=virtual),
        )
        for virtual in range(question.virtual_stages + 1, _MAX_VIRTUAL_STAGES + 1)
        if virtual * question.num_stages <= min(num_layers, _MAX_CHUNKS)
    ]
    if question.min_layers > 0:
        others.append(("a stage without layers (--min-layers 0)", replace(question, min_layers=0)))
    for text, other in others:
        try:
            yield text, best_layout(other, is_rough=True)[0]
        except DynMoError:
            continue  # does not fit in memory, or the micro-batches do not suit


def _is_better(other: LayoutReport, best: LayoutReport) -> bool:
    """Whether both the slowest stage and the iteration gain by more than the threshold."""
    return other.slowest_ms < best.slowest_ms * (
        1 - _NOTICEABLE
    ) and other.iteration_ms < best.iteration_ms * (1 - MIN_GAIN_PCT / 100)

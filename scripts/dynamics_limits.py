"""What any policy could make of a trace at best: two bounds, and why ours is where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dynmo.balancers import choose_layout
from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.simulate.bounds import ideal_ms
from megatron_dynmo.simulate.pipeline import Case

_MAX_WORK = 1e8  # for one state: a tenth of a second


@dataclass(frozen=True)
class Limits:
    """Mean ms an iteration over the iterations that count, and the speed-up over static.

    Attributes:
        oracle_ms: the best split of whole layers found for every single iteration, moves free.
        ideal_ms: what no split can be faster than, not even one into fractions of layers.
        oracle_speedup: of the first.
        ideal_speedup: of the second.
        work_left: work of the last iterations that the dynamic has left, of the dense model's.
        closed_form_ms: what the trace says of the static run; beside it, what the run took.
    """

    oracle_ms: float
    ideal_ms: float
    oracle_speedup: float
    ideal_speedup: float
    work_left: float
    closed_form_ms: float
    static_ms: float

    def fields(self, cell: dict[str, Any]) -> dict[str, Any]:
        """Fields of a row of the table."""
        return {
            "oracle_ms": self.oracle_ms,
            "ideal_ms": self.ideal_ms,
            "oracle_speedup": self.oracle_speedup,
            "ideal_speedup": self.ideal_speedup,
            "work_left": self.work_left,
            "closed_form_ms": self.closed_form_ms,
            "why": self.why(cell),
        }

    def why(self, cell: dict[str, Any]) -> str:
        """One line on the distance to the abstract's figure."""
        ours, paper = cell["speedup"], cell["paper_speedup"]
        share = (
            f"ours keeps {ours / self.oracle_speedup:.0%} of the {self.oracle_speedup:.2f} that "
            f"the best split of whole layers in every iteration, moved for nothing, would bring"
        )
        if ours >= paper:
            return share
        if self.ideal_speedup < paper:
            return (
                f"{share}; on this trace no split, even into fractions of layers, can bring more "
                f"than {self.ideal_speedup:.2f}: the abstract's {paper:.2f} needs a model or a "
                "dynamic that is more uneven than this one"
            )
        return (
            f"{share}; fractions of layers could bring {self.ideal_speedup:.2f} at most; the rest "
            "is the grain of whole layers, and the time until a change is measured and paid for"
        )


def limits_of(case: Case, optimizer_ms: float, found: dict[str, float]) -> Limits:
    """Bounds of a trace.

    Args:
        case: exact costs of the iterations that count, on their pipeline.
        optimizer_ms: of an iteration, beside the schedule.
        found: mean ms an iteration that `static` took.
    """
    oracle: dict[int, float] = {}
    trace = case.trace
    for row, state in enumerate(trace.segment.tolist()):
        if state not in oracle:
            oracle[state] = _best_ms(case, row)
    oracle_ms = float(np.mean([oracle[state] for state in trace.segment.tolist()])) + optimizer_ms
    best_ms = float(ideal_ms(trace, case.pipeline).mean()) + optimizer_ms
    work = trace.forward_ms.sum(axis=1) + trace.backward_ms.sum(axis=1)
    return Limits(
        oracle_ms=oracle_ms,
        ideal_ms=best_ms,
        oracle_speedup=found["static"] / oracle_ms,
        ideal_speedup=found["static"] / best_ms,
        work_left=float(work[-1] / work.max()),
        closed_form_ms=float(case.iteration_ms(case.uniform, slice(None)).mean()) + optimizer_ms,
        static_ms=found["static"],
    )


def _best_ms(case: Case, row: int) -> float:
    """The fastest split found for one iteration."""
    trace, p = case.trace, case.pipeline
    columns = zip(trace.forward_ms[row].tolist(), trace.backward_ms[row].tolist(), strict=True)
    extras = [
        ExtraCost(forward, backward)
        for forward, backward in zip(
            trace.extra_forward_ms[row].tolist(), trace.extra_backward_ms[row].tolist(), strict=True
        )
    ]
    costs = ModelCosts(
        layers=tuple(LayerCost(number, *times) for number, times in enumerate(columns, 1)),
        first_stage_extra=extras[0],
        last_stage_extra=extras[1],
        num_microbatches=p.num_microbatches,
        p2p_ms=p.p2p_ms,
    )
    choice = choose_layout(
        costs, p.num_stages, min_layers=0, current=case.layout(case.uniform), max_work=_MAX_WORK
    )
    bounds = choice.layout.chunk_boundaries
    return float(case.iteration_ms(bounds, slice(row, row + 1))[0])

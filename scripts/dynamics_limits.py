"""What any policy could make of a trace at best: two bounds, and why ours is where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dynmo.balancers import choose_layout
from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.simulate.bounds import ideal_ms
from megatron_dynmo.simulate.pipeline import Case

_MAX_WORK = 1e8  # for one state: a tenth of a second
# By how much a run may differ from the closed form of its trace before it is said.
_CLOSE = 0.02


@dataclass(frozen=True)
class Limits:
    """Speed-ups over static that no policy exceeds, over the run and over its last third.

    Attributes:
        oracle: the best split of whole layers found for every single iteration, moves free.
        ideal: what no split can exceed, not even one into fractions of layers.
        settled_oracle: the first, over the last third.
        settled_ideal: the second, over the last third.
        work_left: time of the layers in the last iteration over that in the most expensive one.
        closed_form: time that the trace gives for the static run, over the time that it took.
    """

    oracle: float
    ideal: float
    settled_oracle: float
    settled_ideal: float
    work_left: float
    closed_form: float

    def fields(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a row of the table."""
        return {
            "oracle_speedup": self.oracle,
            "ideal_speedup": self.ideal,
            "settled_oracle_speedup": self.settled_oracle,
            "settled_ideal_speedup": self.settled_ideal,
            "work_left": self.work_left,
            "closed_form": self.closed_form,
            "why": self.why(cell),
        }

    def why(self, cell: Mapping[str, Any]) -> str:
        """One line on the distance to the bounds and to the abstract's figure."""
        ours, settled, paper = (
            cell[name] for name in ("speedup", "settled_speedup", "paper_speedup")
        )
        text = (
            f"of {self.oracle:.2f} that whole layers allow over the run, moved for nothing in every"
            f" iteration, ours has {ours:.2f}; settled, of {self.settled_oracle:.2f}, {settled:.2f}"
        )
        best = max(self.ideal, self.settled_ideal)
        if max(ours, settled) >= paper:
            pass
        elif best < paper:
            text += (
                f"; on this trace no split, even into fractions of layers, exceeds {best:.2f}: the "
                f"abstract's {paper:.2f} needs a dynamic that is more uneven, or a slower baseline"
            )
        else:
            text += (
                f"; the abstract's {paper:.2f} is within what fractions of layers allow here "
                f"({best:.2f}), but whole layers are coarse at "
                "this number of layers a stage, and changes have to be measured and paid for"
            )
        if abs(self.closed_form - 1) > _CLOSE:
            text += (
                f"; the schedule waits less than the closed form behind these bounds says: static "
                f"takes {1 / self.closed_form:.2f} of it"
            )
        return text


def limits_of(
    case: Case, optimizer_ms: float, static_ms: Mapping[str, float], settled_rows: int
) -> Limits:
    """Bounds of a trace.

    Args:
        case: exact costs of the iterations that count, on their pipeline.
        optimizer_ms: of an iteration, beside the schedule.
        static_ms: ms an iteration of the static run: `mean`, and `settled`, the median of the end.
        settled_rows: iterations at the end that count as settled.
    """
    trace = case.trace
    found: dict[int, float] = {}
    for row, state in enumerate(trace.segment.tolist()):
        if state not in found:
            found[state] = _best_ms(case, row)
    oracle = np.array([found[state] for state in trace.segment.tolist()]) + optimizer_ms
    ideal = ideal_ms(trace, case.pipeline) + optimizer_ms
    closed = case.iteration_ms(case.uniform, slice(None)) + optimizer_ms
    work = trace.forward_ms.sum(axis=1) + trace.backward_ms.sum(axis=1)

    def settled(times: Any) -> float:
        return static_ms["settled"] / float(np.median(times[-settled_rows:]))

    return Limits(
        oracle=static_ms["mean"] / float(oracle.mean()),
        ideal=static_ms["mean"] / float(ideal.mean()),
        settled_oracle=settled(oracle),
        settled_ideal=settled(ideal),
        work_left=float(work[-1] / work.max()),
        closed_form=float(closed.mean()) / static_ms["mean"],
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
        costs, p.num_stages, virtual_stages=p.virtual_stages, min_layers=0,
        current=case.layout(case.uniform), max_work=_MAX_WORK,
    )  # fmt: skip
    bounds = choice.layout.chunk_boundaries
    return float(case.iteration_ms(bounds, slice(row, row + 1))[0])

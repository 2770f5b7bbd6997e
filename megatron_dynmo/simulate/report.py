"""A comparison as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_dynmo.simulate.pipeline import Move
from megatron_dynmo.simulate.run import Comparison, Outcome

__all__ = ["MEANINGS", "comparison_json"]

MEANINGS = {
    "static": "the same number of layers on every stage, Megatron's default",
    "static-parameters": "split by parameters, DeepSpeed's algorithm",
    "best-static": "best split found that never moves, known in hindsight",
    "paper-partition": "at a fixed interval to the split by time, cost or not",
    "paper-diffusion": "at a fixed interval, layers handed between neighbours",
    "ours": "moves when it pays, nothing to choose",
    "balanced": "every stage equally busy, no cost",
    "ideal": "lower bound of any split, even into fractions of layers",
}


def comparison_json(comparison: Comparison, source: dict[str, Any]) -> dict[str, Any]:
    """One object for each policy, and what was simulated.

    Args:
        comparison: the results.
        source: scenario and model, or the file of events.
    """
    case = comparison.case
    return {
        "kind": "simulated",
        "source": source,
        "pipeline": asdict(case.pipeline),
        "num_layers": case.trace.num_layers,
        "num_iterations": case.trace.num_iterations,
        "first_iteration": case.trace.first_iteration,
        "policies": [_outcome_json(comparison, outcome) for outcome in comparison.outcomes],
    }


def _outcome_json(comparison: Comparison, outcome: Outcome) -> dict[str, Any]:
    case = comparison.case
    return {
        "policy": outcome.policy,
        "meaning": MEANINGS.get(outcome.policy, ""),
        "iteration_ms": outcome.iteration_ms.tolist(),
        "total_ms": outcome.total_ms,
        "moving_ms": outcome.moving_ms,
        "speedup_vs_static": comparison.speedup_vs_static(outcome),
        "fraction_of_ideal": comparison.fraction_of_ideal(outcome),
        "gpu_hours": comparison.gpu_hours(outcome),
        "peak_memory_bytes": [int(held) for held in outcome.peak_memory_bytes],
        "layouts": [
            {
                "iteration": case.trace.first_iteration + row,
                "layout": case.layout(boundaries).to_megatron(),
            }
            for row, boundaries in outcome.spans
        ],
        "moves": [_move_json(comparison, move) for move in outcome.moves],
    }


def _move_json(comparison: Comparison, move: Move) -> dict[str, Any]:
    return {
        "iteration": move.iteration,
        "from": comparison.case.layout(move.old).to_megatron(),
        "to": comparison.case.layout(move.new).to_megatron(),
        "layers_moved": move.layers_moved,
        "bytes": move.num_bytes,
        "cost_ms": move.cost_ms,
        "reason": move.reason,
    }

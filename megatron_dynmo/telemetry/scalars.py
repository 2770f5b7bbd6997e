"""Scalars for TensorBoard and Weights & Biases, in Megatron's flat kebab-case.

The values are those of all ranks together (a `ProfileReport` is merged already), so the one rank
that has writers shows the whole pipeline, also after a move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.profile_report import ProfileReport

__all__ = ["MigrationTotals", "ScalarWriter", "profile_scalars"]

_GB = 1e9
_MB = 1e6


@dataclass
class MigrationTotals:
    """Moves made so far in this run.

    Attributes:
        count: moves.
        num_bytes: bytes sent between ranks.
        duration_ms: time spent.
    """

    count: int = 0
    num_bytes: int = 0
    duration_ms: float = 0.0

    def add(self, num_bytes: int, duration_ms: float) -> None:
        """Count one more move."""
        self.count += 1
        self.num_bytes += num_bytes
        self.duration_ms += duration_ms


def profile_scalars(
    report: ProfileReport,
    layout: LayerLayout,
    *,
    predicted_iteration_ms: float | None = None,
    migrations: MigrationTotals | None = None,
    overhead_ms: float | None = None,
    active_ranks: int | None = None,
) -> dict[str, float]:
    """Return {tag: value} of one iteration.

    `stage_{i}` is pipeline rank i with all its virtual stages; times are of the whole iteration.

    Args:
        report: the merged measurement.
        layout: the layout it was measured under.
        predicted_iteration_ms: what was predicted for this layout, if anything was.
        migrations: moves so far.
        overhead_ms: time that megatron_dynmo itself took in the iteration (without moves).
        active_ranks: ranks that take part in training.
    """
    num_microbatches = report.costs.num_microbatches
    scalars = {
        "dynmo/imbalance": report.imbalance,
        "dynmo/bubble-fraction": report.bubble_fraction,
        "dynmo/iteration-ms": report.iteration_ms,
    }
    for pp_rank in range(layout.num_stages):
        stages = [stage for stage in report.stages if stage.pp_rank == pp_rank]
        forward_ms = sum(stage.forward_ms for stage in stages) * num_microbatches
        backward_ms = sum(stage.backward_ms for stage in stages) * num_microbatches
        num_layers = sum(
            len(layout.layers_of(pp_rank, vp_stage)) for vp_stage in range(layout.virtual_stages)
        )
        scalars |= {
            f"dynmo/stage-forward-ms/stage_{pp_rank}": forward_ms,
            f"dynmo/stage-backward-ms/stage_{pp_rank}": backward_ms,
            f"dynmo/stage-busy-ms/stage_{pp_rank}": report.rank_busy_ms[pp_rank],
            f"dynmo/bubble-ms/stage_{pp_rank}": report.rank_idle_ms[pp_rank],
            f"dynmo/layers/stage_{pp_rank}": float(num_layers),
            f"dynmo/mem-max-allocated-gb/stage_{pp_rank}": report.peak_memory_bytes[pp_rank] / _GB,
        }
    if predicted_iteration_ms is not None and report.iteration_ms > 0:
        error_pct = 100.0 * (predicted_iteration_ms / report.iteration_ms - 1.0)
        scalars["dynmo/predicted-iteration-ms"] = predicted_iteration_ms
        scalars["dynmo/prediction-error-pct"] = error_pct
    if migrations is not None:
        scalars["dynmo/migrations"] = float(migrations.count)
        scalars["dynmo/migrated-mb"] = migrations.num_bytes / _MB
        scalars["dynmo/migration-ms"] = migrations.duration_ms
    if overhead_ms is not None and report.iteration_ms > 0:
        scalars["dynmo/overhead-pct"] = 100.0 * overhead_ms / report.iteration_ms
    if active_ranks is not None:
        scalars["dynmo/active-gpus"] = float(active_ranks)
    return scalars


class ScalarWriter:
    """Writes scalars to every writer of this rank.

    Args:
        writers: TensorBoard's SummaryWriter (`add_scalar`) or wandb (`log`), as Megatron's global
            variables hold them; none on the ranks that have none.
    """

    def __init__(self, writers: Sequence[Any]) -> None:
        self._writers = list(writers)

    def write(self, iteration: int, scalars: dict[str, float]) -> None:
        """Write {tag: value} at an iteration."""
        for writer in self._writers:
            if hasattr(writer, "add_scalar"):
                for tag, value in scalars.items():
                    writer.add_scalar(tag, value, iteration)
            else:
                writer.log(scalars, iteration)

    def write_decision(self, iteration: int, text: str) -> None:
        """Write the line that says why layers moved or stayed, where the writer shows text."""
        for writer in self._writers:
            if hasattr(writer, "add_text"):
                writer.add_text("dynmo/decision", text, iteration)

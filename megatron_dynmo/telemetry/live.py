"""The one line for people in each logging interval."""

from __future__ import annotations

from megatron_dynmo.profile_report import ProfileReport

__all__ = ["live_line"]

_MAX_STAGES = 8  # more would not fit a line: then the extremes are shown


def live_line(
    iteration: int,
    report: ProfileReport,
    layout: str,
    *,
    action: str | None = None,
    reason: str | None = None,
) -> str:
    """Return one aligned line, in the manner of Megatron's own log lines.

    ` dynmo iteration     40 | layout Et*4|t*4L | stage ms 93/141 | imbalance 20.5 % | bubble
    18.2 % | stay: ...`

    Args:
        iteration: 1-based number of the iteration that ended.
        report: the merged measurement.
        layout: Megatron layout string in force.
        action: the latest decision (move, stay, ...); None if there was none.
        reason: its reason.
    """
    parts = [
        f" dynmo iteration {iteration:6d}",
        f"layout {layout}",
        f"stage ms {_stage_times(report.rank_busy_ms)}",
        f"imbalance {100 * report.imbalance:4.1f} %",
        f"bubble {100 * report.bubble_fraction:4.1f} %",
    ]
    if action is not None:
        parts.append(f"{action}: {reason}" if reason else action)
    return " | ".join(parts)


def _stage_times(busy_ms: tuple[float, ...]) -> str:
    """Return each rank's busy time; of a long pipeline the least, the mean and the most."""
    digits = 0 if min(busy_ms) >= 10 else 2
    if len(busy_ms) <= _MAX_STAGES:
        return "/".join(f"{value:.{digits}f}" for value in busy_ms)
    mean = sum(busy_ms) / len(busy_ms)
    slowest = busy_ms.index(max(busy_ms))
    return (
        f"{min(busy_ms):.{digits}f}..{max(busy_ms):.{digits}f} "
        f"(mean {mean:.{digits}f}, most on pp_rank {slowest})"
    )

"""Timing of pipeline schedules for many iterations, or many splits of the layers, at once.

The same recurrences as `megatron_dynmo.pipeline_schedule`, whose one-iteration functions the tests
compare these with; here every step is one vector operation over a block of rows that stays in the
processor's cache, so that a thousand stages over a thousand iterations take seconds. Tier: pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.pipeline_schedule import rank_order, time_schedule

__all__ = ["finish_times", "timing_work"]

type Times = NDArray[np.float64]

_BLOCK_ELEMENTS = 65_536  # of one array of a block; a handful of them fit into a 2 MiB cache
_BLOCK_ROWS = 1_024
# What starting the vector operations of a level costs, in elements that they would process.
_LEVEL_OVERHEAD = 13_000
_GATHER = 4  # an element fetched by its index takes as long as so many that lie side by side


def finish_times(
    schedule: str,
    forward_ms: Times,
    backward_ms: Times,
    num_microbatches: int,
    p2p_ms: float = 0.0,
) -> Times:
    """When every rank ends its last backward, for many sets of chunk times.

    Args:
        schedule: "1f1b", "interleaved" or "gpipe".
        forward_ms: [rows, virtual_stages, num_stages], one micro-batch through each chunk.
        backward_ms: the same for the backward pass.
        num_microbatches: micro-batches of an iteration.
        p2p_ms: from the end of a pass to its output's arrival at the neighbour, per hop.

    Returns:
        [rows, num_stages] in ms; the largest of a row is the makespan.

    Raises:
        ConfigError: micro-batches that the interleaved schedule refuses.
    """
    num_rows, virtual_stages, num_stages = forward_ms.shape
    if schedule == "gpipe" and virtual_stages == 1:
        return _gpipe(forward_ms[:, 0], backward_ms[:, 0], num_microbatches, p2p_ms)
    if virtual_stages == 1:
        per_row = num_stages
    else:
        per_row = 2 * num_microbatches * virtual_stages * num_stages
    block = max(1, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // per_row))
    finish = np.empty((num_rows, num_stages))
    for begin in range(0, num_rows, block):
        rows = slice(begin, begin + block)
        # Stage-major, so that a run of stages is one contiguous piece of memory.
        forward = np.ascontiguousarray(forward_ms[rows].reshape(-1, num_stages * virtual_stages).T)
        backward = np.ascontiguousarray(
            backward_ms[rows].reshape(-1, num_stages * virtual_stages).T
        )
        if virtual_stages == 1:
            ends = _one_f_one_b(forward, backward, num_microbatches, p2p_ms)
        else:
            shape = (num_stages, virtual_stages, num_microbatches)
            ends = _by_levels(_plan(schedule, *shape), forward, backward, num_stages, p2p_ms)
        finish[rows] = ends.T
    return finish


def timing_work(
    schedule: str, num_rows: int, num_stages: int, virtual_stages: int, num_microbatches: int
) -> int:
    """About how much `finish_times` has to do, in elements of vectors; for budgets.

    A number and not a measured time, so that every rank that has a budget stops at the same point.
    """
    if schedule == "gpipe" and virtual_stages == 1:
        return _LEVEL_OVERHEAD + num_rows * num_stages
    levels = 2 * (num_microbatches * virtual_stages + num_stages - 1)
    a_level = num_rows * num_stages * (1 if virtual_stages == 1 else _GATHER)
    return levels * (_LEVEL_OVERHEAD + a_level)


def _gpipe(forward_ms: Times, backward_ms: Times, num_microbatches: int, p2p_ms: float) -> Times:
    """All forwards, then all backwards: two flow shops, each with a closed form.

    M jobs with the same times on machines s..P-1 end after the first job's way through all of them
    and M - 1 more turns of the slowest.
    """
    num_stages = forward_ms.shape[1]
    turns, hops = num_microbatches - 1, np.arange(num_stages)[::-1]
    filled = forward_ms.sum(axis=1) + turns * forward_ms.max(axis=1) + (num_stages - 1) * p2p_ms
    from_last = backward_ms[:, ::-1]
    drained = np.cumsum(from_last, axis=1) + turns * np.maximum.accumulate(from_last, axis=1)
    return filled[:, None] + drained[:, ::-1] + hops * p2p_ms


def _one_f_one_b(forward: Times, backward: Times, num_microbatches: int, p2p_ms: float) -> Times:
    """1F1B in diagonals; see `pipeline_schedule.times_1f1b` for why a level is one operation.

    Forward m of stage s has level s + 2m, its backward level 2P - 1 - s + 2m. In a level the
    stages of one parity run forwards and those of the other backwards, so the two are kept apart,
    each in contiguous rows, with a row of -inf at either end for neighbours that do not exist.

    Args:
        forward: [num_stages, iterations].
        backward: the same.
        num_microbatches: micro-batches of an iteration.
        p2p_ms: per hop.

    Returns:
        [num_stages, iterations].
    """
    num_stages, num_rows = forward.shape
    durations = [(forward[parity::2], backward[parity::2]) for parity in (0, 1)]
    # Row r + 1 of free[parity] is stage 2r + parity.
    free = [np.full((len(durations[parity][0]) + 2, num_rows), -np.inf) for parity in (0, 1)]
    for parity in (0, 1):
        free[parity][1 : len(durations[parity][0]) + 1] = 0.0
    scratch = [np.empty_like(free[0]), np.empty_like(free[0])]
    span = 2 * num_microbatches
    for level in range(span + 2 * (num_stages - 1)):
        parity = level % 2
        # Stages of this parity that run a forward: level - 2M < s <= level.
        f = _rows(max(0, level - span + 1), min(num_stages - 1, level), parity)
        # Stages of the other parity that run a backward: 2P - 1 - level <= s < 2P - 1 - level + 2M.
        since = 2 * num_stages - 1 - level
        b = _rows(max(0, since), min(num_stages - 1, since + span - 1), 1 - parity)
        mine, other = free[parity], free[1 - parity]
        # Stage s - 1 of the even stage 2r is row r of the odd ones, s - 1 of 2r + 1 is r + 1.
        ends = _run(mine, other, f, parity, durations[parity][0], p2p_ms, scratch[0])
        # Both read the level before, so nothing is written until both have been computed.
        back = _run(other, mine, b, 2 - parity, durations[1 - parity][1], p2p_ms, scratch[1])
        mine[f.start + 1 : f.stop + 1] = ends
        other[b.start + 1 : b.stop + 1] = back
    finish = np.empty_like(forward)
    for parity in (0, 1):
        finish[parity::2] = free[parity][1:-1]
    return finish


def _rows(first: int, last: int, parity: int) -> slice:
    """Indices r with first <= 2r + parity <= last."""
    begin, end = (first - parity + 1) // 2, (last - parity) // 2 + 1
    return slice(begin, max(begin, end))


def _run(
    own: Times,
    neighbour: Times,
    rows: slice,
    offset: int,
    duration: Times,
    p2p_ms: float,
    scratch: Times,
) -> Times:
    """Ends of one pass on each of the rows: max(own end, neighbour's end + p2p) + duration.

    offset: row in `neighbour` of the neighbour of row 0.
    """
    ends = scratch[: rows.stop - rows.start]
    source = neighbour[rows.start + offset : rows.stop + offset]
    if p2p_ms:
        np.add(source, p2p_ms, out=ends)
        source = ends
    np.maximum(own[rows.start + 1 : rows.stop + 1], source, out=ends)
    ends += duration[rows]
    return ends


# ------------------------------------------------------------------------ any other schedule


class _Level(NamedTuple):
    """Passes that depend on earlier levels only; indices into the list of all passes."""

    passes: NDArray[np.intp]
    before: NDArray[np.intp]  # what the rank ran before
    inputs: NDArray[np.intp]  # what produced its input
    durations: NDArray[np.intp]  # chunk, plus the number of chunks for a backward


class _Plan(NamedTuple):
    """A schedule as levels; pass number num_passes stands for "nothing to wait for"."""

    num_passes: int
    levels: tuple[_Level, ...]
    last: NDArray[np.intp]  # last pass of every rank


@lru_cache(maxsize=8)
def _plan(schedule: str, num_stages: int, virtual_stages: int, num_microbatches: int) -> _Plan:
    """Sort the passes of Megatron's order into levels."""
    num_chunks = num_stages * virtual_stages
    half = num_chunks * num_microbatches
    nothing = 2 * half
    before = np.full(nothing + 1, nothing, dtype=np.intp)
    orders = []
    for rank in range(num_stages):
        order = [
            (direction == "backward") * half
            + (vp_stage * num_stages + rank) * num_microbatches
            + microbatch
            for direction, vp_stage, microbatch in rank_order(
                schedule, rank, num_stages, num_microbatches, virtual_stages=virtual_stages
            )
        ]
        before[order[1:]] = order[:-1]
        orders.append(order)
    inputs = np.full(nothing + 1, nothing, dtype=np.intp)
    inputs[num_microbatches:half] = np.arange(half - num_microbatches)
    inputs[half : nothing - num_microbatches] = np.arange(half + num_microbatches, nothing)
    # With passes that all take 1, the end of a pass is the longest chain of passes up to it.
    ones = np.ones((virtual_stages, num_stages))
    ends = time_schedule(schedule, ones, ones, num_microbatches)
    depth = np.concatenate([end.ravel() for end in ends])
    at_depth = [np.flatnonzero(depth == d) for d in range(1, round(depth.max()) + 1)]
    # Chunk and direction of a pass are one number: passes are numbered direction, chunk, batch.
    levels = tuple(_Level(p, before[p], inputs[p], p // num_microbatches) for p in at_depth)
    return _Plan(nothing, levels, np.array([order[-1] for order in orders], dtype=np.intp))


def _by_levels(
    plan: _Plan, forward: Times, backward: Times, num_stages: int, p2p_ms: float
) -> Times:
    """End of every rank's last pass, [num_stages, iterations]; arguments [chunks, iterations]."""
    durations = np.concatenate([forward, backward])
    ends = np.empty((plan.num_passes + 1, forward.shape[1]))
    ends[-1] = -np.inf
    for level in plan.levels:
        start = np.maximum(ends[level.before], ends[level.inputs] + p2p_ms)
        ends[level.passes] = np.maximum(start, 0.0) + durations[level.durations]
    return ends[plan.last]

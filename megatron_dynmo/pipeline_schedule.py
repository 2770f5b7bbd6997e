"""When each stage of a pipeline computes what: the order of Megatron's schedules and its timing.

A schedule is data: for every pp_rank the order in which it runs the forward and backward passes of
its model chunks. Timing follows by one recurrence: a pass starts when its rank is free and its
input has arrived, which is p2p_ms after the neighbour finished producing it.

Orders:
Source: megatron/core/pipeline_parallel/schedules.py@core_v0.19.2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.errors import ConfigError

__all__ = [
    "SCHEDULES",
    "Pass",
    "ScheduleTimes",
    "microbatches_in_flight",
    "rank_order",
    "time_schedule",
    "times_1f1b",
]

SCHEDULES = ("1f1b", "interleaved", "gpipe")

type Pass = tuple[Literal["forward", "backward"], int, int]
"""(direction, vp_stage, micro-batch)."""


@dataclass(frozen=True)
class ScheduleTimes:
    """What a schedule makes of stage times.

    Attributes:
        makespan_ms: from the first forward to the last backward of any rank.
        busy_ms: computing time of every pp_rank.
        idle_ms: makespan_ms - busy_ms of every pp_rank.
        finish_ms: when every pp_rank ends its last backward.
    """

    makespan_ms: float
    busy_ms: list[float]
    idle_ms: list[float]
    finish_ms: list[float]


def rank_order(
    schedule: str,
    pp_rank: int,
    num_stages: int,
    num_microbatches: int,
    *,
    virtual_stages: int = 1,
    microbatch_group_size: int | None = None,
) -> list[Pass]:
    """The passes of one rank in the order in which Megatron runs them.

    Args:
        schedule: "1f1b", "interleaved" or "gpipe" (all forwards, then all backwards).
        pp_rank: the rank.
        num_stages: pipeline-parallel size.
        num_microbatches: micro-batches of an iteration.
        virtual_stages: model chunks on a rank; only interleaved takes more than one.
        microbatch_group_size: micro-batches that a chunk runs before the next chunk's turn;
            Megatron's default, the pipeline size, if None.

    Raises:
        ConfigError: an unknown schedule, or micro-batches that Megatron refuses.
    """
    group = num_stages if microbatch_group_size is None else microbatch_group_size
    if schedule == "interleaved" and virtual_stages == 1:
        schedule = "1f1b"  # as Megatron, which takes one virtual stage for none
    _check_shape(schedule, num_stages, num_microbatches, virtual_stages, group)
    if schedule != "interleaved":
        group = num_microbatches
    # Groups of micro-batches go through the chunks in turn: forwards from the first chunk to the
    # last, backwards from the last to the first.
    table = [
        (vp_stage, microbatch)
        for begin in range(0, num_microbatches, group)
        for vp_stage in range(virtual_stages)
        for microbatch in range(begin, min(begin + group, num_microbatches))
    ]
    num_warmup = {
        "1f1b": num_stages - pp_rank - 1,
        "gpipe": len(table),
        "interleaved": 2 * (num_stages - pp_rank - 1) + (virtual_stages - 1) * group,
    }[schedule]
    num_warmup = min(num_warmup, len(table))
    forwards: list[Pass] = [("forward", vp, mb) for vp, mb in table]
    backwards: list[Pass] = [("backward", virtual_stages - 1 - vp, mb) for vp, mb in table]
    steady = zip(forwards[num_warmup:], backwards, strict=False)
    order = forwards[:num_warmup] + [one for pair in steady for one in pair]
    return order + backwards[len(table) - num_warmup :]


@lru_cache(maxsize=4096)
def microbatches_in_flight(
    schedule: str, pp_rank: int, num_stages: int, virtual_stages: int, num_microbatches: int
) -> NDArray[np.intp]:
    """Micro-batches of which a rank holds activations, at the moments that can be the fullest.

    Args:
        schedule: one of SCHEDULES.
        pp_rank: the rank.
        num_stages: pipeline-parallel size.
        virtual_stages: model chunks on a rank.
        num_microbatches: micro-batches of an iteration.

    Returns:
        [moments, virtual_stages], shared by all callers: not to be written to. A rank with one
        chunk has one such moment, that of its highest count.
    """
    if virtual_stages == 1:
        count = num_stages - pp_rank if schedule != "gpipe" else num_microbatches
        return np.array([[min(count, num_microbatches)]], dtype=np.intp)
    order = rank_order(
        schedule, pp_rank, num_stages, num_microbatches, virtual_stages=virtual_stages
    )
    change = np.zeros((len(order), virtual_stages), dtype=np.intp)
    for step, (direction, vp_stage, _) in enumerate(order):
        change[step, vp_stage] = 1 if direction == "forward" else -1
    return np.unique(np.cumsum(change, axis=0), axis=0)


def time_schedule(
    schedule: str,
    forward_ms: NDArray[np.float64],
    backward_ms: NDArray[np.float64],
    num_microbatches: int,
    p2p_ms: float = 0.0,
    *,
    microbatch_group_size: int | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """End times of every pass, by running the ranks' orders event by event.

    Args:
        schedule: one of SCHEDULES.
        forward_ms: [virtual_stages, num_stages], one micro-batch through one chunk.
        backward_ms: the same for the backward pass.
        num_microbatches: micro-batches of an iteration.
        p2p_ms: from the end of a pass to its output's arrival at the neighbour, per hop.
        microbatch_group_size: see `rank_order`.

    Returns:
        (forward_end, backward_end), each [virtual_stages, num_stages, num_microbatches].

    Raises:
        ConfigError: as `rank_order`.
    """
    virtual_stages, num_stages = forward_ms.shape
    num_chunks = num_stages * virtual_stages
    orders = [
        rank_order(
            schedule,
            rank,
            num_stages,
            num_microbatches,
            virtual_stages=virtual_stages,
            microbatch_group_size=microbatch_group_size,
        )
        for rank in range(num_stages)
    ]
    durations = {"forward": forward_ms.ravel().tolist(), "backward": backward_ms.ravel().tolist()}
    ends: dict[str, list[list[float | None]]] = {
        direction: [[None] * num_microbatches for _ in range(num_chunks)] for direction in durations
    }
    free, position = [0.0] * num_stages, [0] * num_stages
    # A rank runs until an input is missing and is woken by the rank that produces it.
    awake = list(range(num_stages))
    while awake:
        rank = awake.pop()
        while position[rank] < len(orders[rank]):
            direction, vp_stage, microbatch = orders[rank][position[rank]]
            chunk = vp_stage * num_stages + rank
            source, target = chunk - 1, chunk + 1
            if direction == "backward":
                source, target = target, source
            start = free[rank]
            if 0 <= source < num_chunks:
                produced = ends[direction][source][microbatch]
                if produced is None:
                    break
                start = max(start, produced + p2p_ms)
            free[rank] = start + durations[direction][chunk]
            ends[direction][chunk][microbatch] = free[rank]
            position[rank] += 1
            if 0 <= target < num_chunks and target % num_stages != rank:
                awake.append(target % num_stages)
    assert all(p == len(o) for p, o in zip(position, orders, strict=True)), "schedule deadlocks"
    shape = (virtual_stages, num_stages, num_microbatches)
    forward_end = np.array(ends["forward"], dtype=np.float64).reshape(shape)
    return forward_end, np.array(ends["backward"], dtype=np.float64).reshape(shape)


def times_1f1b(
    forward_ms: NDArray[np.float64],
    backward_ms: NDArray[np.float64],
    num_microbatches: int,
    p2p_ms: float = 0.0,
) -> NDArray[np.float64]:
    """When every stage ends its last backward under 1F1B; for many sets of stage times at once.

    The same recurrence as `time_schedule`, swept in diagonals. Forward m of stage s has level
    s + 2m and its backward level 2P - 1 - s + 2m: along every order and every message the level
    grows, inputs come from exactly one level before, and a stage has one pass in a level. So each
    of the 2(M + P - 1) levels is one vector operation.

    Args:
        forward_ms: [..., num_stages].
        backward_ms: [..., num_stages].
        num_microbatches: micro-batches of an iteration.
        p2p_ms: arrival after the producing pass, per hop.

    Returns:
        [..., num_stages] in ms.
    """
    num_stages = forward_ms.shape[-1]
    stages = np.arange(num_stages)
    free = np.zeros(np.broadcast_shapes(forward_ms.shape, backward_ms.shape))
    for level in range(2 * (num_microbatches + num_stages - 1)):
        before = free.copy()
        # Stages of the level's parity run a forward, the others a backward.
        first = level % 2
        f = stages[first::2]
        f = f[(level - f >= 0) & (level - f < 2 * num_microbatches)]
        since = level - (2 * num_stages - 1) + stages[1 - first :: 2]
        b = stages[1 - first :: 2][(since >= 0) & (since < 2 * num_microbatches)]
        for at, step, duration, edge in (
            (f, -1, forward_ms, 0),
            (b, 1, backward_ms, num_stages - 1),
        ):
            arrived = before[..., np.clip(at + step, 0, num_stages - 1)] + p2p_ms
            arrived = np.where(at == edge, 0.0, arrived)
            free[..., at] = np.maximum(before[..., at], arrived) + duration[..., at]
    return free


def _check_shape(
    schedule: str, num_stages: int, num_microbatches: int, virtual_stages: int, group: int
) -> None:
    """Refuse what Megatron refuses, with what to change."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"unknown schedule {schedule!r}; use one of {', '.join(SCHEDULES)}")
    if num_microbatches < 1:
        raise ConfigError(f"{num_microbatches} micro-batches: at least 1 is needed")
    if schedule != "interleaved":
        if virtual_stages != 1:
            raise ConfigError(
                f"schedule {schedule!r} has one chunk a rank, not {virtual_stages}; use "
                "'interleaved'"
            )
        return
    remainder = num_microbatches % group if group else 0
    if not num_stages <= group <= num_microbatches or 0 < remainder < num_stages:
        fewer = max(num_microbatches // num_stages, 1) * num_stages
        raise ConfigError(
            f"{num_microbatches} micro-batches in groups of {group} on {num_stages} interleaved "
            "stages: a group needs at least as many micro-batches as there are stages, and so does "
            f"the last, smaller group; use {fewer} or {fewer + num_stages} micro-batches in groups "
            f"of {num_stages}"
        )

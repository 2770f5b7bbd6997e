"""Exact balancing: the contiguous split whose slowest stage is as fast as any split's can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from megatron_dynmo.balancers.inputs import (
    check_boundaries,
    check_counts,
    edge_row,
    non_negative,
    positive,
)
from megatron_dynmo.balancers.minmax import Limit, minimise
from megatron_dynmo.balancers.resource import Resource, to_integers
from megatron_dynmo.balancers.ties import (
    Retention,
    keep_most,
    keep_most_then_least_memory,
    spread_evenly,
)
from megatron_dynmo.errors import BalanceError

__all__ = ["partition"]


def partition(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    first_stage_extra: float = 0.0,
    last_stage_extra: float = 0.0,
    stage_speeds: Sequence[float] | None = None,
    layer_memory: Sequence[float] | None = None,
    stage_memory_limit: float | Sequence[float] | None = None,
    min_layers: int = 1,
    layer_activation_memory: Sequence[float] | None = None,
    num_microbatches: int | None = None,
    first_stage_memory: float = 0.0,
    last_stage_memory: float = 0.0,
    current: Sequence[int] | None = None,
    layer_bytes: Sequence[float] | None = None,
) -> list[int]:
    """Split layers over stages so that the largest stage time is the smallest possible.

    A stage's time is the sum of its layers' costs plus its extra, divided by its speed. The
    optimum is exact in real arithmetic of the given floats, not within an epsilon; on one machine
    or another, every rank computes the same split. Ties go to the split that moves least from
    `current`, then to the smallest peak memory, then to the one nearest to equal shares.

    Args:
        layer_costs: per layer, in order, at least 0, in any unit (ms, parameters, bytes).
        num_stages: pipeline stages.
        first_stage_extra: what the first stage costs besides its layers (embedding).
        last_stage_extra: the same for the last (output layer and loss).
        stage_speeds: relative speed of each stage, 1.0 when None; 0.5 takes twice as long.
        layer_memory: bytes of parameters, gradients and optimizer state of each layer.
        stage_memory_limit: bytes allowed on each stage, one number or one for each stage.
        min_layers: fewest layers of a stage; 0 allows more stages than layers.
        layer_activation_memory: bytes that a layer keeps for each micro-batch in flight. Under
            1F1B stage s of P holds min(num_microbatches, P - s) of them, s from 0.
        num_microbatches: micro-batches of an iteration; at least num_stages when None.
        first_stage_memory: bytes of the first stage besides its layers.
        last_stage_memory: the same for the last.
        current: boundaries in force, num_stages + 1; among equals the nearest wins.
        layer_bytes: what moving each layer costs; every layer the same when None.

    Returns:
        num_stages + 1 boundaries: stage s owns layers boundaries[s] + 1 .. boundaries[s + 1].

    Raises:
        BalanceError: input that makes no sense, or memory in which no split fits; the text names
            the stage, the bytes needed and allowed, and what would fit.
    """
    num_layers = len(layer_costs)
    check_counts(num_layers, num_stages, min_layers)
    costs = non_negative(layer_costs, "layer_costs", num_layers)
    edges = edge_row((first_stage_extra, last_stage_extra))
    speeds = [1] * num_stages
    if stage_speeds is not None:
        speeds = to_integers(positive(stage_speeds, "stage_speeds", num_stages))[0][0]
    time = _resource(costs, edges, speeds, num_stages)
    memory, limits = _memory(
        layer_memory, layer_activation_memory, (first_stage_memory, last_stage_memory),
        stage_memory_limit, num_microbatches, num_layers, num_stages, min_layers,
    )  # fmt: skip
    optimum = minimise(time, limits, min_layers)
    assert optimum is not None, "the memory limits were found feasible before"
    level, boundaries = optimum
    limits = [Limit.at(time, level), *limits]
    if current is not None:
        return _least_moved(limits, min_layers, memory, current, layer_bytes, boundaries)
    if memory is not None:
        smallest = minimise(memory, limits, min_layers)
        assert smallest is not None
        limits, boundaries = [*limits, Limit.at(memory, smallest[0])], smallest[1]
    return spread_evenly(limits, min_layers, time, boundaries)


def _least_moved(
    limits: list[Limit],
    min_layers: int,
    memory: Resource | None,
    current: Sequence[int],
    layer_bytes: Sequence[float] | None,
    fallback: list[int],
) -> list[int]:
    """Break ties by the distance from the current boundaries, then by memory."""
    num_layers, num_stages = limits[0].resource.num_layers, limits[0].resource.num_stages
    bounds = check_boundaries("current boundaries", current, num_layers, num_stages)
    sizes = [1] * num_layers
    if layer_bytes is not None:
        (sizes,), _ = to_integers(non_negative(layer_bytes, "layer_bytes", num_layers))
    retention = Retention(bounds, sizes)
    if memory is None:
        return keep_most(limits, min_layers, retention) or fallback
    return keep_most_then_least_memory(limits, min_layers, retention, memory) or fallback


def _memory(
    layer_memory: Sequence[float] | None,
    activation_memory: Sequence[float] | None,
    edges: tuple[float, float],
    limit: float | Sequence[float] | None,
    num_microbatches: int | None,
    num_layers: int,
    num_stages: int,
    min_layers: int,
) -> tuple[Resource | None, list[Limit]]:
    """The memory resource and the limit on it, once it is known that some split fits."""
    if layer_memory is None and activation_memory is None:
        if limit is not None:
            raise BalanceError("stage_memory_limit is set without layer_memory: give both")
        return None, []
    static: Sequence[float] = [0] * num_layers if layer_memory is None else layer_memory
    static = non_negative(static, "layer_memory", num_layers)
    scaled = None
    if activation_memory is not None:
        scaled = non_negative(activation_memory, "layer_activation_memory", num_layers)
    edge_bytes = non_negative(edges, "first_stage_memory and last_stage_memory", 2)
    allowed = _limits(limit, num_stages)
    rows, unit = to_integers(static, scaled or [], edge_bytes, allowed or [])
    factors = None
    if scaled is not None:
        in_flight = num_stages if num_microbatches is None else num_microbatches
        factors = [min(in_flight, num_stages - s) for s in range(num_stages)]
    extras = _extras(rows[2], num_stages)
    scaled_row = rows[1] if scaled is not None else None
    memory = Resource(rows[0], extras, [1] * num_stages, scaled_row, factors)
    if allowed is None:
        return memory, []
    limited = Resource(rows[0], extras, rows[3], scaled_row, factors)
    fullest = minimise(limited, [], min_layers)
    assert fullest is not None
    if fullest[0] > 1:
        _raise_does_not_fit(limited, memory, fullest[1], unit, min_layers)
    return memory, [Limit.at(limited, Fraction(1))]


def _raise_does_not_fit(
    limited: Resource, memory: Resource, boundaries: list[int], unit: Fraction, min_layers: int
) -> None:
    """Say on which stage even the best split for memory fails, and what would fit."""

    def in_bytes(units: Fraction | int) -> str:
        return f"{math.ceil(units * unit):,}"

    def fill(stage: int) -> Fraction:
        return limited.level(stage, boundaries[stage], boundaries[stage + 1])

    stage = max(range(limited.num_stages), key=fill)
    i, j = boundaries[stage], boundaries[stage + 1]
    layers = "no layers" if i == j else f"layer {j}" if i + 1 == j else f"layers {i + 1} to {j}"
    smallest = minimise(memory, [], min_layers)
    assert smallest is not None
    raise BalanceError(
        f"no split fits in memory: in the best one stage {stage} needs "
        f"{in_bytes(memory.level(stage, i, j))} bytes for {layers}, allowed are "
        f"{in_bytes(limited.speeds[stage])}; {in_bytes(smallest[0])} bytes on every stage would "
        "fit, or use more stages, or recompute activations"
    )


# -------------------------------------------------------------------- checking input


def _limits(limit: float | Sequence[float] | None, num_stages: int) -> list[float] | None:
    if limit is None:
        return None
    row: Any = [limit] * num_stages if np.ndim(limit) == 0 else limit
    return positive(row, "stage_memory_limit", num_stages)


def _extras(edges: Sequence[int], num_stages: int) -> list[int]:
    extras = [0] * num_stages
    extras[0] += edges[0]
    extras[-1] += edges[1]
    return extras


def _resource(
    amounts: list[float], edges: list[float], speeds: list[int], num_stages: int
) -> Resource:
    rows, _ = to_integers(amounts, edges)
    return Resource(rows[0], _extras(rows[1], num_stages), speeds)

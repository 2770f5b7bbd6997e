"""Measures iterations on this rank and merges them over all ranks, a window at a time.

Tier: torch, not Megatron.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynmo.clock import Clock
from megatron_dynmo.profile_report import (
    ProfileReport,
    ProfileShape,
    costs_vector,
    from_vector,
    times_of,
)
from megatron_dynmo.profile_sample import StageSample
from megatron_dynmo.profiler import LayerProfiler


class Observer:
    """One rank's measurements.

    The first iteration after the start and after every move is measured but not counted: buffers
    are cold and gradient reduction does not overlap yet.

    Args:
        run: a `MegatronRun`.
        clock: source of time.
        window: iterations in a window.
    """

    def __init__(self, run: Any, clock: Clock, window: int) -> None:
        self._run = run
        self._window = window
        self._profiler = LayerProfiler(clock, device=run.device)
        self._vectors: list[torch.Tensor] = []
        self._iterations: list[int] = []
        self._is_cold = True
        self.attach()

    def attach(self) -> None:
        """Follow the layers this rank holds now, in the pipeline as it is now.

        What was measured of the window is dropped.
        """
        topology = self._run.topology
        self._pp_rank = topology.pp_rank
        self._tp_group = topology.tp_group if topology.tp_size > 1 else None
        self._shape = ProfileShape(self._run.num_layers, topology.pp_size, topology.virtual_stages)
        exchanges = self._run.moe_layers and topology.token_exchange_size > 1
        self._moe_group = topology.token_exchange_group if exchanges else None
        self._moe_times = times_of(self._run.moe_layers, self._shape).to(self._run.device)
        self._profiler.attach(self._run.chunk_modules(), self._run.static_bytes)
        self._vectors.clear()
        self._iterations.clear()
        self._is_cold = True

    def begin_iteration(self) -> None:
        """Start to measure."""
        self._profiler.begin_iteration()

    def begin_schedule(self) -> None:
        """The pipeline schedule of the iteration starts."""
        self._profiler.begin_forward_backward()

    def end_iteration(self, iteration: int) -> float:
        """Stop measuring.

        Args:
            iteration: 1-based number of the iteration that ended.

        Returns:
            Wall time of the step on this rank, in ms.
        """
        sample = self._profiler.end_iteration()
        if self._is_cold:
            self._is_cold = False
        else:
            self.add(iteration, sample)
        return sample.iteration_ms

    def add(self, iteration: int, sample: StageSample) -> None:
        """Take what this rank measured in an iteration into the window."""
        self._vectors.append(costs_vector(sample, self._shape, self._pp_rank))
        self._iterations.append(iteration)

    @property
    def is_window_full(self) -> bool:
        """Whether `collect` has a whole window; the same on every rank."""
        return len(self._vectors) >= self._window

    def collect(self) -> list[tuple[int, ProfileReport]]:
        """Merge the window over all ranks and start the next one.

        Returns:
            (iteration, report) of each measured iteration, the same on every rank.

        Collective:
            Tensor-parallel groups, groups in which MoE layers exchange tokens, then all ranks of
            the world.
        """
        vectors, iterations = self._vectors, self._iterations
        self._vectors, self._iterations = [], []
        if not vectors:
            return []
        merged = torch.stack(vectors).to(self._run.device)
        if self._tp_group is not None:
            # A layer's time on a tensor-parallel rank holds its waiting for the others.
            dist.all_reduce(merged, op=dist.ReduceOp.MIN, group=self._tp_group)
        if self._moe_group is not None:
            # All wait for the one with the most tokens, and the first to come for the last: the
            # least time is from when all were there until the slowest was done.
            times = merged[:, self._moe_times]
            dist.all_reduce(times, op=dist.ReduceOp.MIN, group=self._moe_group)
            merged[:, self._moe_times] = times
        dist.all_reduce(merged, op=dist.ReduceOp.MAX)
        merged = merged.cpu()
        reports = [from_vector(row, self._shape) for row in merged]
        return list(zip(iterations, reports, strict=True))

    @contextlib.contextmanager
    def forward_step(self, vp_stage: int) -> Iterator[Callable[[Any], None]]:
        """Around the forward step of a micro-batch; yields what takes the step's output."""
        with self._profiler.forward_step(vp_stage) as produced:
            yield produced

    @contextlib.contextmanager
    def backward_step(self, output: Any) -> Iterator[None]:
        """Around the backward step of a micro-batch."""
        with self._profiler.backward_step(output):
            yield

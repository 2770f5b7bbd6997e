"""EmulatedDevice: this rank's device in virtual time, driven by the real run.

Layers, edges, messages and the optimizer step tell it when they happen; it moves the clock by what
the emulation says they cost. Nothing here touches a number of the training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from megatron_dynmo.adapters.topology import Topology
from megatron_dynmo.clock import VirtualClock
from megatron_dynmo.emulate.devices import Emulation, UnitCosts
from megatron_dynmo.emulate.emulation_file import read_emulation
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.migrator import MigrationReport
from megatron_dynmo.plan import MigrationPlan
from megatron_dynmo.profiler import ChunkModules

# Arguments of Megatron's functions that send and receive; each is a tensor or None.
_SENDS = ("tensor_send_prev", "tensor_send_next")
_RECEIVES = ("tensor_recv_prev", "tensor_recv_next")

type Factors = Callable[[int], tuple[float, float]]
"""layer_number -> factors on its forward and its backward."""

_device: EmulatedDevice | None = None


def device() -> EmulatedDevice | None:
    """The device of this process; None before the run has begun."""
    return _device


def start(
    path: Path | str, topology: Topology, num_layers: int, iteration: Callable[[], int]
) -> EmulatedDevice:
    """Put an emulated device under this rank.

    Args:
        path: the emulation file.
        topology: this rank's place.
        num_layers: decoder layers of the model.
        iteration: gives the iteration (1-based) that is running.

    Raises:
        ConfigError: The file is wrong, or describes another model or pipeline.
    """
    global _device
    emulation = read_emulation(path)
    if len(emulation.layers) != num_layers:
        raise ConfigError(
            f"{path} describes {len(emulation.layers)} layers, the model has {num_layers}"
        )
    absent = sorted(rank for rank in emulation.speeds if rank >= topology.pp_size)
    if absent:
        raise ConfigError(
            f"{path}: speeds of pp_rank {absent}, the pipeline has {topology.pp_size} ranks"
        )
    _device = EmulatedDevice(emulation, topology.pp_rank, topology.device, iteration)
    return _device


class EmulatedDevice:
    """One rank's device in virtual time.

    Args:
        emulation: what everything costs.
        pp_rank: this rank's pipeline rank.
        torch_device: where tensors that travel live.
        iteration: gives the iteration (1-based) that is running.

    Attributes:
        clock: this rank's virtual time; the same on all ranks between two iterations.
    """

    def __init__(
        self,
        emulation: Emulation,
        pp_rank: int,
        torch_device: torch.device,
        iteration: Callable[[], int],
    ) -> None:
        self.clock = VirtualClock()
        self._emulation = emulation
        self._pp_rank = pp_rank
        self._torch_device = torch_device
        self._iteration = iteration
        self._factors: Factors | None = None
        self._handles: list[RemovableHandle] = []
        self._units: list[UnitCosts] = []
        self._stamps_on_their_way: list[Any] = []

    def attach(self, chunks: Sequence[ChunkModules]) -> None:
        """Charge exactly these modules from now on; hooks of an earlier attach are removed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._units.clear()
        for chunk in chunks:
            for layer_number, layer in chunk.layers:
                self._charge(layer, self._emulation.layers[layer_number - 1], layer_number)
            if chunk.embedding is not None and self._pp_rank == 0 and chunk.vp_stage == 0:
                self._charge(chunk.embedding, self._emulation.first_stage_extra)
            if chunk.output is not None:
                self._charge(chunk.output, self._emulation.last_stage_extra)

    def follow(self, factors: Factors | None) -> None:
        """Let the layers' costs follow the state of a dynamic.

        Args:
            factors: asked at every pass of a layer of this rank; None ends it.
        """
        self._factors = factors

    # ---------------------------------------------------------------- compute

    def _charge(
        self, module: torch.nn.Module, unit: UnitCosts, layer_number: int | None = None
    ) -> None:
        self._units.append(unit)
        # In front, so that the time is spent before the profiler's own hook reads the clock.
        self._handles.append(
            module.register_forward_hook(
                partial(self._after_forward, unit, layer_number), prepend=True
            )
        )

    def _after_forward(
        self,
        unit: UnitCosts,
        layer_number: int | None,
        module: torch.nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        forward, _ = self._factors_of(layer_number)
        self._spend(unit.forward_at(self._iteration()) * forward)
        first = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled() and first.grad_fn is not None:
            # A node's hook runs after its tensor's, by which the profiler sees a layer begin.
            first.grad_fn.register_prehook(partial(self._before_backward, unit, layer_number))

    def _before_backward(self, unit: UnitCosts, layer_number: int | None, grads: Any) -> None:
        _, backward = self._factors_of(layer_number)
        self._spend(unit.backward_at(self._iteration()) * backward)

    def _factors_of(self, layer_number: int | None) -> tuple[float, float]:
        if layer_number is None or self._factors is None:
            return 1.0, 1.0
        return self._factors(layer_number)

    def _spend(self, duration_ms: float) -> None:
        """Spend what takes that long on a rank of speed 1."""
        self.clock.advance(duration_ms / self._speed())

    def _speed(self) -> float:
        return self._emulation.speed(self._pp_rank, self._iteration())

    # ---------------------------------------------------------------- messages

    def exchange(self, communicate: Callable[..., Any], **arguments: Any) -> Any:
        """Send and receive as Megatron does, every message followed by its sender's time.

        Args:
            communicate: Megatron's `_p2p_ops` or `_batched_p2p_ops`.
            arguments: its arguments.

        Returns:
            Its requests; one that receives advances the clock when it is waited for.

        Collective:
            This rank and its pipeline neighbours, as the messages themselves.
        """
        requests = communicate(**arguments)
        stamps = {
            name: self._stamp(self.clock.now_ms if name in _SENDS else 0.0)
            for name in (*_SENDS, *_RECEIVES)
            if arguments[name] is not None
        }
        nobody = dict.fromkeys((*_SENDS, *_RECEIVES))
        # The same function sends the times: over the same groups and in the same order.
        stamp_requests = communicate(**(arguments | nobody | stamps))
        arrivals = {
            name: partial(self._arrive, stamps[name], arguments[name].nbytes)
            for name in _RECEIVES
            if name in stamps
        }
        if isinstance(requests, list):  # batched: Megatron waits for all of them, in order
            return [
                *requests,
                *stamp_requests,
                *(_Request((), arrive) for arrive in arrivals.values()),
            ]
        handles = dict(requests)
        for name, request in stamp_requests.items():
            if "tensor_" + name in arrivals:
                both = (requests[name], request)
                handles[name] = _Request(both, arrivals["tensor_" + name])
            else:
                # Megatron forgets some sends; a time must not be freed before it has left.
                self._stamps_on_their_way.append(request)
        return handles

    def _stamp(self, time_ms: float) -> torch.Tensor:
        return torch.tensor([time_ms], dtype=torch.float64, device=self._torch_device)

    def _arrive(self, stamp: torch.Tensor, num_bytes: int) -> None:
        self.clock.advance_to(stamp.item() + self._emulation.link.hop_ms(num_bytes))

    # ---------------------------------------------------------------- between the passes

    def end_step(self) -> None:
        """Charge gradient reduction and optimizer; then every rank has the time of the latest.

        The gradient norm needs all gradients, and the iteration ends with the slowest optimizer
        step, as in `cost.predict_iteration_ms`.

        Collective:
            All ranks of the world.
        """
        for request in self._stamps_on_their_way:
            request.wait()
        self._stamps_on_their_way.clear()
        iteration, speed = self._iteration(), self._speed()
        reduce_ms = sum(unit.reduce_ms.at(iteration) / speed for unit in self._units)
        optimizer_ms = sum(unit.optimizer_ms.at(iteration) / speed for unit in self._units)
        optimizer_ms += self._emulation.optimizer_ms.at(iteration) / speed
        latest = torch.cat((self._stamp(self.clock.now_ms + reduce_ms), self._stamp(optimizer_ms)))
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        gradients_there_ms, slowest_ms = latest.tolist()
        self.clock.advance_to(gradients_there_ms)
        self.clock.advance(slowest_ms)

    def meet(self) -> None:
        """Have the time of the latest rank, also on ranks that were away.

        Collective:
            All ranks of the world.
        """
        latest = self._stamp(self.clock.now_ms)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        self.clock.advance_to(latest.item())

    def moved(
        self, plan: MigrationPlan, report: MigrationReport, chunks: Sequence[ChunkModules]
    ) -> MigrationReport:
        """Charge a move that was made, and go on with the layers that are here now.

        Args:
            plan: the move.
            report: what it took in real time.
            chunks: this rank's modules after it.

        Returns:
            The report with the charged duration.

        Collective:
            All ranks of the world.
        """
        self.attach(chunks)
        if self._emulation.move_cost is not None:
            duration_ms = self._emulation.move_ms(plan)
        else:
            longest = self._stamp(report.duration_ms)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            duration_ms = longest.item()
        self.clock.advance(duration_ms)
        return dataclasses.replace(report, duration_ms=duration_ms)


class _Request:
    """What a receiver waits for: the message and its time together; once, as gloo wants it."""

    def __init__(self, parts: Sequence[Any], arrive: Callable[[], None]) -> None:
        self._parts = parts
        self._arrive = arrive

    def wait(self) -> None:
        """Wait for both, and until the virtual time of arrival."""
        for part in self._parts:
            part.wait()
        self._arrive()

"""`torch.cuda` without a device: one pretended device whose queue is always empty.

On a CPU every operation has finished when it returns, so a stream or an event has nothing to wait
for. The random generator of the pretended device is the CPU's own: it is the one that dropout draws
from, so it must be the one that Megatron seeds, forks, saves and restores.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_dynmo.cpu.factories import CPU
from megatron_dynmo.patching import Kind, PatchSpec


class CpuStream:
    """A stream whose work has always finished."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.device = CPU
        self.priority = priority

    def wait_stream(self, stream: object) -> None:
        """Return at once: the other stream has finished too."""

    def wait_event(self, event: object) -> None:
        """Return at once: the event has happened."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: all work has finished."""
        return True

    def record_event(self, event: "CpuEvent | None" = None) -> "CpuEvent":
        """Record the present in `event`, or in a new one, and return it."""
        event = event or CpuEvent()
        event.record(self)
        return event


class CpuEvent:
    """A point in time on the host clock."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._time_s = time.perf_counter()

    def record(self, stream: object = None) -> None:
        """Remember the present."""
        self._time_s = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, end_event: "CpuEvent") -> float:
        """Return the milliseconds between this event and `end_event`."""
        return (end_event._time_s - self._time_s) * 1e3


@functools.cache
def _the_stream() -> CpuStream:
    """Return the only stream: Megatron compares streams by identity."""
    return CpuStream()


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing: on a CPU there is nothing to wait for."""


@contextlib.contextmanager
def _stream_context(stream: object) -> Iterator[None]:
    """Run the body on the only stream there is."""
    yield


def _get_rng_state(device: object = "cuda") -> torch.Tensor:
    """Return the state of the CPU generator, a new uint8 tensor."""
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    """Set the state of the CPU generator."""
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.default_generator.manual_seed(int(seed))


def _same(value: object) -> Callable[[object], object]:
    """Return a patch factory that gives `value` whatever the original was."""
    return lambda original: value


# name in torch.cuda -> (stand-in, why Megatron needs it, other places in torch that hold it)
_STAND_INS: tuple[tuple[str, Any, str, tuple[str, ...]], ...] = (
    ("current_device", lambda: CPU, "Megatron allocates with device=current_device()", ()),
    ("device_count", lambda: 1, "process groups and seeds are set up only if a device exists", ()),
    ("set_device", _nothing, "initialisation selects the device of the local rank", ()),
    ("synchronize", _nothing, "timers, pipeline communication and checkpoints synchronise", ()),
    ("current_stream", lambda device=None: _the_stream(), "gradient buckets read it", ()),
    ("stream", _stream_context, "DDP is built and MoE copies are made on a side stream", ()),
    ("Stream", CpuStream, "DDP and the MoE dispatcher create side streams", ()),
    ("Event", CpuEvent, "the MoE dispatcher orders copies with events", ()),
    (
        "is_current_stream_capturing",
        lambda: False,
        "the MoE dispatcher and the router ask whether a CUDA graph is being captured",
        (),
    ),
    (
        "get_rng_state",
        _get_rng_state,
        "the tracker and checkpoints read the generator that dropout draws from",
        ("torch.cuda.random:get_rng_state",),
    ),
    (
        "set_rng_state",
        _set_rng_state,
        "checkpoints restore the generator that dropout draws from",
        ("torch.cuda.random:set_rng_state",),
    ),
    (
        "manual_seed",
        _manual_seed,
        "torch would queue the seed for a device that never comes",
        ("torch.cuda.random:manual_seed",),
    ),
)


def cuda_api_specs() -> tuple[PatchSpec, ...]:
    """Return one patch for each function of `torch.cuda` that a training run reaches."""
    return tuple(
        PatchSpec(
            name=f"cpu.cuda.{name}",
            target=f"torch.cuda:{name}",
            kind=Kind.WRAP,
            factory=_same(stand_in),
            reason=reason,
            seam_tried="none: the call is made by name from Megatron's own code",
            remove_when="Megatron reaches its device through an interface with a CPU backend",
            bindings=bindings,
            requires="torch>=2.6",
        )
        for name, stand_in, reason, bindings in _STAND_INS
    )

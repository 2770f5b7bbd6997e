"""`torch.cuda` without a device: one pretended device whose queue is always empty.

On a CPU every operation has finished when it returns, so a stream or an event has nothing to wait
for. The random generator of the pretended device is the CPU's own: it is the one that dropout draws
from, so it must be the one that Megatron seeds, forks, saves and restores. What the host draws for
itself must then not advance it: on a GPU the two are apart, and a run that resumes draws the seeds
of its data loaders at another time than one that never stopped.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class CpuProperties:
    """What the pretended device says of itself.

    Attributes:
        name: For people.
        major: From 10 on Megatron needs no CUDA_DEVICE_MAX_CONNECTIONS, which orders the queues of
            a GPU and means nothing here.
        minor: Always 0.
        total_memory: Bytes of main memory, shared by all ranks of this machine.
        multi_processor_count: Cores of this machine.
    """

    name: str = "CPU"
    major: int = 10
    minor: int = 0
    total_memory: int = 0
    multi_processor_count: int = 1


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


@contextlib.contextmanager
def _stream_context(stream: object) -> Iterator[None]:
    """Run the body on the only stream there is."""
    yield


def _get_device_properties(device: object = None) -> CpuProperties:
    """Return the properties of the only device."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return CpuProperties(total_memory=memory_bytes, multi_processor_count=os.cpu_count() or 1)


def _get_rng_state(device: object = "cuda") -> torch.Tensor:
    """Return the state of the CPU generator, a new uint8 tensor."""
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    """Set the state of the CPU generator."""
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.default_generator.manual_seed(int(seed))


def _loader_draws_apart(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the start of a data loader's epoch so that its seed does not advance the generator."""

    def __init__(self: Any, loader: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            original(self, loader)

    return __init__


def _in_place_of(stand_in: Callable[..., Any]) -> Callable[[object], Callable[..., Any]]:
    """Return a patch factory that makes `stand_in`, as a new object, whatever the original was."""

    def factory(original: object) -> Callable[..., Any]:
        if isinstance(stand_in, type):
            return stand_in

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return stand_in(*args, **kwargs)

        return replacement

    return factory


def _kebab(name: str) -> str:
    """Write a Python name as part of a patch name: `Stream` becomes `stream-class`."""
    return name.lower() + "-class" if name[0].isupper() else name.replace("_", "-")


# name in torch.cuda -> (stand-in, why Megatron needs it, other places in torch that hold it)
_STAND_INS: tuple[tuple[str, Any, str, tuple[str, ...]], ...] = (
    ("current_device", lambda: CPU, "Megatron allocates with device=current_device()", ()),
    ("device_count", lambda: 1, "process groups and seeds are set up only if a device exists", ()),
    ("set_device", lambda device: None, "initialisation selects the device of the local rank", ()),
    (
        "get_device_properties",
        _get_device_properties,
        "argument checks ask for its generation when tensor or context parallelism is on",
        (),
    ),
    (
        "synchronize",
        lambda device=None: None,
        "timers, pipeline communication and checkpoints synchronise",
        (),
    ),
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
    """Return one patch for each function of `torch.cuda` that a training run reaches.

    They count as wraps although they never call the original: what they rely on is the documented
    signature, so no digest of the body could protect them.
    """
    apart = PatchSpec(
        name="cpu-data-loader-seed",
        target="torch.utils.data.dataloader:_BaseDataLoaderIter.__init__",
        kind=Kind.WRAP,
        factory=_loader_draws_apart,
        params=("self", "loader"),
        reason="a loader draws its seed from dropout's generator, so a resumed run would differ",
        seam_tried="the loader's own generator argument: Megatron does not pass one",
        remove_when="Megatron passes a generator to its data loaders",
        requires="torch>=2.6",
    )
    stand_ins = tuple(
        PatchSpec(
            name=f"cpu-cuda-{_kebab(name)}",
            target=f"torch.cuda:{name}",
            kind=Kind.WRAP,
            factory=_in_place_of(stand_in),
            reason=reason,
            seam_tried="none: the call is made by name from Megatron's own code",
            remove_when="Megatron reaches its device through an interface with a CPU backend",
            bindings=bindings,
            requires="torch>=2.6",
        )
        for name, stand_in, reason, bindings in _STAND_INS
    )
    return (*stand_ins, apart)

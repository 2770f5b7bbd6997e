"""One interface to time: the host's wall clock, CUDA events, or virtual time.

Profiler, trigger and timeline read time only through `Clock`, so a run on emulated devices is
measured by the same code as a real one. Tier: torch, not Megatron.
"""

from __future__ import annotations

import time
from typing import Protocol, cast

import torch

__all__ = ["Clock", "CudaClock", "Mark", "VirtualClock", "WallClock", "make_clock"]

# Opaque outside the clock that made it: seconds, a recorded CUDA event, or virtual milliseconds.
type Mark = object


class Clock(Protocol):
    """Points in time that cost next to nothing to take and are read later.

    Life of a mark: `mark()` during the step; `settle()` once after it; then any number of
    `elapsed_ms()`; then `recycle()`, after which no mark taken before may be used.
    """

    def mark(self) -> Mark:
        """Take the present; never waits for the device."""
        ...

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds from `start` to `end`; both must have settled."""
        ...

    def settle(self) -> None:
        """Wait until every mark taken so far can be read."""
        ...

    def recycle(self) -> None:
        """Take back every mark given out, so that its resources serve again."""
        ...


class WallClock:
    """Host time; right for CPU compute, where an operation has ended when it returns."""

    def mark(self) -> Mark:
        """Return the host's monotonic time in seconds."""
        return time.perf_counter()

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds between two host times."""
        return (cast(float, end) - cast(float, start)) * 1e3

    def settle(self) -> None:
        """Return at once: host times are known when taken."""

    def recycle(self) -> None:
        """Do nothing: a number holds no resource."""


class CudaClock:
    """Device time on the stream that is current when a mark is taken.

    Autograd runs a node's hooks on the stream of its forward, so marks in tensor hooks are in
    order with the layer's own kernels. Events are pooled: after the first iteration no event is
    created unless more marks are taken than ever before.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        """Record an event on the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._used.append(event)
        return event

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the device time between two events (resolution about 0.5 us)."""
        return cast(torch.cuda.Event, start).elapsed_time(cast(torch.cuda.Event, end))

    def settle(self) -> None:
        """Wait for the newest event of each stream: the one synchronisation of an iteration.

        Marks may lie on several streams, so each is asked and only one that is still pending is
        waited for.
        """
        for event in reversed(self._used):
            if not event.query():
                event.synchronize()

    def recycle(self) -> None:
        """Return every event to the pool."""
        self._free.extend(self._used)
        self._used.clear()


class VirtualClock:
    """Time that advances only when it is told to; in milliseconds, the same in every run."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def advance(self, duration_ms: float) -> None:
        """Spend `duration_ms` >= 0 of virtual time."""
        assert duration_ms >= 0.0, duration_ms
        self.advance_to(self.now_ms + duration_ms)

    def advance_to(self, time_ms: float) -> None:
        """Wait until `time_ms`; an earlier time has passed already and changes nothing."""
        self.now_ms = max(self.now_ms, time_ms)

    def mark(self) -> Mark:
        """Return the virtual time."""
        return self.now_ms

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        """Return the virtual milliseconds between two marks."""
        return cast(float, end) - cast(float, start)

    def settle(self) -> None:
        """Return at once: virtual times are known when taken."""

    def recycle(self) -> None:
        """Do nothing: a number holds no resource."""


def make_clock(device: torch.device | str) -> Clock:
    """Return the clock of a device: CUDA events on a GPU, the wall clock elsewhere."""
    return CudaClock() if torch.device(device).type == "cuda" else WallClock()

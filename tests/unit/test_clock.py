import torch

from megatron_dynmo import clock as clock_module
from megatron_dynmo.clock import CudaClock, VirtualClock, WallClock, make_clock


def test_wall_clock_measures_what_passed_between_two_marks(monkeypatch):
    times = iter([10.0, 10.25])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: next(times))
    clock = WallClock()
    start, end = clock.mark(), clock.mark()
    clock.settle()
    assert clock.elapsed_ms(start, end) == 250.0
    clock.recycle()


def test_virtual_time_passes_only_when_told_to():
    clock = VirtualClock()
    start = clock.mark()
    clock.advance(3.0)
    clock.advance_to(2.0)  # has passed already
    middle = clock.mark()
    clock.advance_to(7.5)
    assert clock.elapsed_ms(start, middle) == 3.0
    assert clock.elapsed_ms(middle, clock.mark()) == 4.5


def test_device_decides_the_clock():
    assert isinstance(make_clock("cpu"), WallClock)
    assert isinstance(make_clock(torch.device("cuda", 0)), CudaClock)


class FakeEvent:
    """Stands for torch.cuda.Event: counts how many exist and how often one was waited for."""

    made = 0
    waited = 0
    now_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        type(self).made += 1

    def record(self):
        FakeEvent.now_ms += 1.5
        self.at_ms = FakeEvent.now_ms
        self.done = False

    def query(self):
        return self.done

    def synchronize(self):
        type(self).waited += 1
        self.done = True

    def elapsed_time(self, end):
        assert self.done and end.done, "read before it settled"
        return end.at_ms - self.at_ms


def test_cuda_events_are_pooled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = CudaClock()
    for _ in range(5):
        marks = [clock.mark() for _ in range(8)]
        assert len(set(map(id, marks))) == 8
        clock.settle()
        assert clock.elapsed_ms(marks[0], marks[-1]) == 7 * 1.5
        clock.recycle()
    assert FakeEvent.made == 8

import time

import pytest
import torch.distributed as dist

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.elastic.managers import ManagerError, NodeChange
from megatron_dynmo.elastic.meeting import Host, Parked
from megatron_dynmo.elastic.release import NodeRelease

KINDS = {
    "exit": {"release": "exit"},
    "restart": {"release": "restart", "job_manager": "command:true"},
}
CHANGE = NodeChange(40, (2, 3), ("n2",), ("n0",))


class Agreed:
    def of_rank_0(self, values):
        return list(values)


class Told:
    def __init__(self):
        self.events = []

    def answered(self, *event):
        self.events.append(event)


class Manager:
    def __init__(self, answer="ok", refusal=None, delay_s=0.0):
        self.asked, self.answer, self.refusal, self.delay_s = [], answer, refusal, delay_s

    def check(self, restarts=False):
        self.restarts = restarts
        if self.refusal:
            raise self.refusal

    def release(self, change):
        self.asked.append(change)
        time.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def released(manager, monkeypatch, leave=True, rounds=40, kind="exit"):
    monkeypatch.setattr("megatron_dynmo.elastic.release._SETTLE_S", 0.0)
    monkeypatch.setattr("megatron_dynmo.elastic.release.make_manager", lambda text: manager)
    store, told = dist.HashStore(), Told()
    release = NodeRelease(DynMoConfig(**KINDS[kind]), Host(store, True), told, acts=True)
    release.begin(CHANGE, generation=1)
    release.follow(41)
    assert manager.asked == []  # nobody has left
    if leave:
        for rank in CHANGE.ranks:
            Parked(store, rank, 0).leave(1)
    for _ in range(rounds):
        release.follow(42)
        time.sleep(0.005)
    return release, told.events


def test_nodes_are_given_back_after_the_ranks_have_left(monkeypatch):
    manager = Manager("shrunk")
    _, events = released(manager, monkeypatch)
    assert manager.asked == [CHANGE]
    assert events == [(42, "release", (2, 3), ("n2",), "shrunk")]


def test_a_failing_manager_is_only_told(monkeypatch, caplog):
    _, events = released(Manager(ZeroDivisionError("boom")), monkeypatch)
    assert events[0][-1] == "ZeroDivisionError: boom"
    assert "training goes on" in caplog.text


def test_a_hanging_manager_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("megatron_dynmo.elastic.release._END_S", 0.1)
    started = time.monotonic()
    release, events = released(Manager(delay_s=3.0), monkeypatch)
    release.end(43)
    assert events == [] and time.monotonic() - started < 2.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refusal", [ManagerError("not in a job"), ValueError("not in a job")])
def test_ranks_park_where_the_manager_would_refuse(refusal, kind, monkeypatch, caplog):
    manager = Manager(refusal=refusal)
    release, _ = released(manager, monkeypatch, leave=False, rounds=1, kind=kind)
    assert not release.may_exit(7, Agreed())
    assert "not in a job" in caplog.text and "parked instead" in caplog.text
    manager.refusal = None
    assert release.may_exit(7, Agreed()) and manager.restarts == (kind == "restart")


def test_two_releases_do_not_overlap(monkeypatch):
    monkeypatch.setattr("megatron_dynmo.elastic.release._SETTLE_S", 0.0)
    both, running = [], []

    class Careful(Manager):
        def release(self, change):
            running.append(change)
            both.append(len(running))
            time.sleep(0.05)
            running.remove(change)
            return super().release(change)

    manager = Careful()
    monkeypatch.setattr("megatron_dynmo.elastic.release.make_manager", lambda text: manager)
    store, told = dist.HashStore(), Told()
    release = NodeRelease(DynMoConfig(release="exit"), Host(store, True), told, acts=True)
    second = NodeChange(50, (1,), ("n1",), ("n0",))
    release.begin(CHANGE, generation=1)
    release.begin(second, generation=2)
    Parked(store, 1, 0).leave(2)  # heard first
    for _ in range(5):
        release.follow(51)
    assert manager.asked == []
    for rank in CHANGE.ranks:
        Parked(store, rank, 0).leave(1)
    release.end(52)
    assert manager.asked == [CHANGE, second] and both == [1, 1]
    assert [event[3] for event in told.events] == [("n2",), ("n1",)]

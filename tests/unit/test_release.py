import time

import torch.distributed as dist

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.elastic.managers import ManagerError, NodeChange
from megatron_dynmo.elastic.meeting import Host, Parked
from megatron_dynmo.elastic.release import NodeRelease

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

    def check(self):
        if self.refusal:
            raise ManagerError(self.refusal)

    def release(self, change):
        self.asked.append(change)
        time.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def released(manager, monkeypatch, leave=True, rounds=40):
    monkeypatch.setattr("megatron_dynmo.elastic.release._SETTLE_S", 0.0)
    monkeypatch.setattr("megatron_dynmo.elastic.release.make_manager", lambda text: manager)
    store, told = dist.HashStore(), Told()
    release = NodeRelease(DynMoConfig(release="exit"), Host(store, True), told, acts=True)
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


def test_ranks_park_where_the_manager_would_refuse(monkeypatch, caplog):
    release, _ = released(Manager(refusal="not inside a job"), monkeypatch, leave=False, rounds=1)
    assert not release.may_exit(7, Agreed())
    assert "not inside a job" in caplog.text and "parked instead" in caplog.text
    release, _ = released(Manager(), monkeypatch, leave=False, rounds=1)
    assert release.may_exit(7, Agreed())

"""When stages leave and come back, with a run and ranks that are only pretended."""

import itertools
import json

import torch.distributed as dist

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.cost import LayerCost, ModelCosts
from megatron_dynmo.elastic.managers import ManagerError
from megatron_dynmo.elastic.packing import StageMap
from megatron_dynmo.elasticity import Elasticity
from megatron_dynmo.layout import LayerLayout

EVEN, COLLAPSED = [1.0] * 8, [0.001] * 6 + [4.0, 4.0]


class World:
    rank, generation = 0, 0

    def __init__(self):
        self.store = dist.HashStore()


class Members:
    """Rank 0's view of four stages of one rank each."""

    stage = 0

    def __init__(self, log):
        self.world, self.log = World(), log
        self.stage_map = StageMap((frozenset(),) * 4)

    def ranks_of(self, stages):
        return tuple(stages)

    def nodes_of(self, ranks):
        return ()

    def regroup(self, stages, layout):
        self.log.append(("regroup", tuple(stages), str(layout)))

    def progress(self):
        return {}


class Run:
    first_iteration, train_iters, is_emulated = 0, 1000, True

    def __init__(self, log):
        self.log = log

    def make_membership(self, form_groups, *, packs, by_node, restarts):
        return Members(self.log)

    def save_and_end(self):
        self.log.append(("save and end",))


class Session:
    """Moves at once, agrees with itself, and remembers what was said."""

    def __init__(self, log):
        self.layout, self.times, self.log = LayerLayout.even(8, 4), EVEN, log
        self.consensus = self.reporter = self

    def of_rank_0(self, values):
        return list(values)

    def present_costs(self, iteration):
        layers = tuple(LayerCost(i, t, 2 * t) for i, t in enumerate(self.times, start=1))
        return ModelCosts(layers, num_microbatches=8), (1.0,) * self.layout.num_stages

    def move(self, iteration, layout):
        self.layout = layout
        self.log.append(("move", str(layout)))
        return True

    def regrouped(self, iteration, layout):
        self.layout = layout

    def packing(self, iteration, action, reason, old, new, iteration_ms):
        self.log.append((action, str(new)))

    def elastic(self, iteration, event, ranks, hosts):
        self.log.append((event, tuple(ranks)))

    def answered(self, iteration, event, ranks, hosts, answer):
        self.log.append((event, tuple(ranks)))
        self.answer = answer

    def warn(self, text):
        self.log.append(("warn", text))


def following(**settings):
    log = []
    session = Session(log)
    return Elasticity(DynMoConfig(**settings), Run(log), session, None, None), session, log


def windows(elasticity, first, count, iteration_ms=100.0):
    for iteration in range(first, first + 3 * count, 3):
        elasticity.act(iteration - 1)
        elasticity.consider(iteration, iteration_ms)
    elasticity.act(first + 3 * count)


def test_a_run_packs_when_two_windows_agree():
    elasticity, session, log = following(pack="on")
    windows(elasticity, 3, 2)
    assert log == []
    session.times = COLLAPSED
    windows(elasticity, 12, 2)
    assert log == [
        ("advise", "Et*7|tL"),
        ("pack", "Et*7|tL"),
        ("move", "Et*7|||tL"),
        ("regroup", (0, 3), "Et*7|tL"),
        ("pack", (1, 2)),
        ("park", (1, 2)),
    ]
    log.clear()
    windows(elasticity, 30, 3)  # and stays so
    assert log == []


def test_parked_stages_are_called_when_the_load_grows(monkeypatch):
    elasticity, session, log = following(pack="on")
    session.times = COLLAPSED
    windows(elasticity, 3, 2)
    log.clear()
    session.times = EVEN
    monkeypatch.setattr("megatron_dynmo.elastic.meeting.Host.call", lambda self, ranks, s: ())
    windows(elasticity, 30, 2, iteration_ms=200.0)
    assert [what[0] for what in log] == ["advise", "pack", "regroup", "move", "rejoin"]
    assert log[2] == ("regroup", (0, 1, 2, 3), "Et*7|||tL")
    assert log[3] == ("move", "Ett|tt|tt|ttL") and log[4] == ("rejoin", (1, 2))


def test_stages_that_do_not_answer_are_not_called_again(monkeypatch):
    elasticity, session, log = following(pack="on")
    session.times = COLLAPSED
    windows(elasticity, 3, 2)
    log.clear()
    session.times = EVEN
    monkeypatch.setattr("megatron_dynmo.elastic.meeting.Host.call", lambda self, ranks, s: (2,))
    windows(elasticity, 30, 2, iteration_ms=200.0)
    assert log[-1][0] == "warn" and "[2] do not answer" in log[-1][1]
    # The other one is healthy, and comes as soon as it pays.
    log.clear()
    called = []
    monkeypatch.setattr(
        "megatron_dynmo.elastic.meeting.Host.call",
        lambda self, ranks, s: called.extend(ranks) or (),
    )
    windows(elasticity, 60, 2, iteration_ms=200.0)
    assert called == [1] and log[-1] == ("rejoin", (1,))
    # It was parked when that was found out, and is told.
    off, go = (json.loads(elasticity._host._store.get(f"say/{message}")) for message in (1, 2))
    assert off["kind"] == "off" and go["state"]["gone"] == [2]
    log.clear()
    windows(elasticity, 90, 4, iteration_ms=200.0)
    assert called == [1] and {what[0] for what in log} <= {"advise"}


RESTARTS = {"pack": "on", "release": "restart", "job_manager": "command:true"}


def exited_and_needed(monkeypatch, iteration_ms, manager, num_windows=6):
    """Two stages whose ranks have exited are needed again."""
    monkeypatch.setattr("megatron_dynmo.elastic.release.make_manager", lambda text: manager)
    elasticity, session, log = following(**RESTARTS)
    session.times = COLLAPSED
    windows(elasticity, 3, 2)
    assert log[-1] == ("pack", (1, 2))
    log.clear()
    session.times = EVEN
    windows(elasticity, 30, num_windows, iteration_ms)
    return session, [what for what in log if what[0] != "advise"]


class Starter:
    asked = ()

    def check(self, restarts=False):
        pass

    def restart(self, iteration, num_nodes):
        self.asked += ((iteration, num_nodes),)
        return "will do"


def test_a_run_whose_ranks_have_exited_is_started_anew(monkeypatch):
    session, log = exited_and_needed(monkeypatch, 10_000.0, manager := Starter())
    assert log == [("pack", "Ett|tt|tt|ttL"), ("restart", (1, 2)), ("save and end",)]
    assert manager.asked == ((35, 0),) and session.answer == "will do"


def test_a_run_that_ends_soon_is_not_started_anew(monkeypatch):
    # About 970 iterations are left, and half of their time could be saved: five minutes.
    _, log = exited_and_needed(monkeypatch, 600.0, manager := Starter())
    assert log == [] and manager.asked == ()


def test_a_manager_that_does_not_start_the_run_anew_is_asked_again_later(monkeypatch, caplog):
    class Refuses(Starter):
        def restart(self, iteration, num_nodes):
            answer = super().restart(iteration, num_nodes)
            if len(self.asked) < 3:
                raise ManagerError("not today")
            return answer

    _, log = exited_and_needed(monkeypatch, 10_000.0, manager := Refuses(), 70)
    assert log == [*3 * [("pack", "Ett|tt|tt|ttL")], ("restart", (1, 2)), ("save and end",)]
    windows_between = [
        (later[0] - earlier[0]) // 3 for earlier, later in itertools.pairwise(manager.asked)
    ]
    assert windows_between == [20, 40]
    assert "not today" in caplog.text and "training goes on" in caplog.text


def test_advice_moves_nobody():
    elasticity, session, log = following()
    session.times = COLLAPSED
    windows(elasticity, 3, 4)
    assert log == [("advise", "Et*7|tL")]


def test_the_end_of_training_is_no_time_to_pack():
    elasticity, session, log = following(pack="on")
    session.times = COLLAPSED
    windows(elasticity, 985, 4)
    assert {what[0] for what in log} == {"advise"}


def test_forced_packs_take_late_stages_first():
    elasticity, session, log = following(force_pack="4:3;7:2")
    session.times = COLLAPSED
    windows(elasticity, 3, 3)
    assert [what for what in log if what[0] == "regroup"] == [
        ("regroup", (0, 1, 3), "Et*3|t*3|ttL"),
        ("regroup", (0, 3), "Et*4|t*4L"),
    ]
    assert not [what for what in log if what[0] == "advise"]

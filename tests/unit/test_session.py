"""What a session tells of a decision is what it does with it."""

from types import SimpleNamespace

import pytest

from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.session import Session
from megatron_dynmo.trigger import Decision

OLD, NEW = (
    LayerLayout.from_megatron(text, num_layers=4, num_stages=2) for text in ("Ett|ttL", "Et|tttL")
)


def decided(decision, *, moves_by_itself):
    """The action that a session tells, and the layouts that it moves to."""
    told, moves = [], []
    session = Session.__new__(Session)
    session.layout, session.elasticity, session._latest = OLD, None, SimpleNamespace()
    session._moves_by_itself = moves_by_itself
    session.observer = SimpleNamespace(collect=list)
    session._run = SimpleNamespace(topology=SimpleNamespace(pp_size=2), check_layout=str)
    session._decider = SimpleNamespace(decide=lambda iteration, reports: decision)
    session.consensus = SimpleNamespace(of_rank_0=list)
    session.reporter = SimpleNamespace(decision=lambda _, what, report: told.append(what.action))
    session._move_when_due = lambda iteration, new: moves.append(new)
    session._decide(7)
    return told, moves


@pytest.mark.parametrize(
    ("decision", "moves_by_itself", "told", "moves"),
    [
        (Decision("move", "it pays", OLD, NEW), True, ["move"], [NEW]),
        (Decision("move", "it pays", OLD, NEW), False, ["advise"], []),
        (Decision("stay", "it is the best", OLD, OLD), True, ["stay"], []),
        (Decision("stay", "it is the best", OLD, OLD), False, ["stay"], []),
    ],
)
def test_a_move_that_is_not_made_is_told_as_advice(decision, moves_by_itself, told, moves):
    assert decided(decision, moves_by_itself=moves_by_itself) == (told, moves)

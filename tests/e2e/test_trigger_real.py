"""Real runs on two ranks whose layers take a known time: the trigger does what it promises."""

import pytest

from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.telemetry.events import read_events
from tests.e2e.slow_layers import equal, train_slowly
from tests.e2e.training import TINY_GPT
from tests.ranks import run_ranks


def slow_last_rank(rank, layer_number, iteration):
    """Rank 1 is a slow machine, whatever layers it holds."""
    return 3.0 if rank == 1 else 1.0


def oscillating(rank, layer_number, iteration):
    """Layer 1 is heavy in every other iteration, layer 4 in between."""
    return 3.0 if layer_number == (1 if iteration % 2 else 4) else 1.0


@pytest.fixture
def run(tmp_path):
    """Run on two ranks from a layout and return decisions, moves and the last layout.

    Training is to be long, so that a move pays, and is left after the iterations asked for.
    """

    def run(factor, layout, iterations):
        run_ranks(
            train_slowly,
            2,
            factor,
            *TINY_GPT,
            *("--train-iters", "400", "--exit-interval", str(iterations)),
            *("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", layout),
            *("--dynmo-log-dir", str(tmp_path)),
            timeout_s=200,
        )
        events = read_events(tmp_path / EVENTS_FILE)
        decisions = [event for event in events if event["event"] == "decision"]
        moves = [event for event in events if event["event"] == "migration"]
        assert decisions and all(decision["reason"] for decision in decisions)
        return decisions, moves, moves[-1]["to"] if moves else layout

    return run


def test_an_uneven_start_is_put_right_in_the_first_window(run):
    decisions, moves, layout = run(equal, "Et|t*3L", 11)
    assert layout == "Ett|ttL"
    assert [move["to"] for move in moves] == [layout]
    assert decisions[0]["action"] == "move"
    assert {decision["action"] for decision in decisions[1:]} == {"stay"}


@pytest.mark.matrix
def test_a_slow_rank_gets_fewer_layers(run):
    decisions, _, layout = run(slow_last_rank, "Ett|ttL", 15)
    assert layout == "Et*3|tL"
    assert decisions[-1]["action"] == "stay"


@pytest.mark.matrix
def test_an_oscillating_load_does_not_thrash(run):
    decisions, moves, _ = run(oscillating, "Ett|ttL", 24)
    assert len(decisions) >= 4
    assert len(moves) <= 2

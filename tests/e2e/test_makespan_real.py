"""Real runs on two ranks take what the schedule says of the costs that a real run measured.

Measured and predicted times are of the same machine and minute, and their ratio counts: the time
from the start of the schedule to the last backward, the optimizer step left out. A busy machine
stretches what the layers do not sleep, so this stays out of CI.
"""

import statistics

import pytest

from megatron_dynmo.cost import predict_layout_ms
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.simulate.recorded import read_recording
from megatron_dynmo.telemetry.events import read_events
from tests.e2e.slow_layers import equal, train_slowly
from tests.e2e.training import TINY_GPT
from tests.ranks import run_ranks

pytestmark = pytest.mark.matrix

NUM_STAGES, NUM_MICROBATCHES = 2, 8
EQUAL, UNEVEN, INTERLEAVED = "Ett|ttL", "Et|t*3L", "Et|t|t|tL"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Profiles of a real run and their costs, by its layout; the first one pays for start-up."""
    found = {}
    for text in (EQUAL, UNEVEN, INTERLEAVED):
        folder = tmp_path_factory.mktemp("run")
        run_ranks(
            train_slowly,
            NUM_STAGES,
            equal,
            *TINY_GPT,
            *("--train-iters", "18", "--global-batch-size", str(NUM_MICROBATCHES)),
            *("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", text),
            *("--dynmo-mode", "observe", "--dynmo-log-dir", str(folder)),
            timeout_s=200,
        )
        file = folder / EVENTS_FILE
        profiles = [event for event in read_events(file) if event["event"] == "profile"]
        found[text] = profiles[1:], read_recording(file)
    return found


def makespan_ms(profiles):
    """How long the schedule took: a rank is busy or idle from its start to its end."""
    return statistics.median(
        sum(s["busy_ms"] + s["idle_ms"] for s in profile["stages"]) / NUM_STAGES
        for profile in profiles
    )


def test_equal_stages_take_the_closed_form(recorded):
    profiles, _ = recorded[EQUAL]
    slots = NUM_MICROBATCHES + NUM_STAGES - 1
    one_ms = statistics.median(
        max(stage["busy_ms"] for stage in profile["stages"]) / NUM_MICROBATCHES
        for profile in profiles
    )
    assert makespan_ms(profiles) == pytest.approx(slots * one_ms, rel=0.10)


@pytest.mark.parametrize("run", [EQUAL, UNEVEN, INTERLEAVED])
@pytest.mark.parametrize("costs_of", [EQUAL, UNEVEN])
def test_a_run_takes_what_the_costs_of_any_run_predict(recorded, run, costs_of):
    profiles, recording = recorded[costs_of]
    layout = LayerLayout.from_megatron(run, num_layers=4, num_stages=NUM_STAGES)
    rows = [profile["iteration"] - recording.trace.first_iteration for profile in profiles]
    predicted = statistics.median(
        predict_layout_ms(recording.trace.costs_at(row, num_microbatches=NUM_MICROBATCHES), layout)
        for row in rows
    )
    assert makespan_ms(recorded[run][0]) == pytest.approx(predicted, rel=0.10)


def test_a_recording_says_which_pipeline_it_is_of(recorded):
    shapes = {
        text: (found.num_stages, found.virtual_stages, found.num_microbatches)
        for text, (_, found) in recorded.items()
    }
    assert shapes == {EQUAL: (2, 1, 8), UNEVEN: (2, 1, 8), INTERLEAVED: (2, 2, 8)}

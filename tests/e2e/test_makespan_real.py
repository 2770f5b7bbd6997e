"""Real runs on two ranks take what the schedule says of the costs that a real run measured.

Measured and predicted times are of the same machine and minute, and their ratio counts. A busy
machine stretches what the layers do not sleep, so this stays out of CI.
"""

import statistics

import pytest

from megatron_dynmo.cost import predict_layout_ms
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.simulate.recorded import read_recording
from megatron_dynmo.telemetry.events import read_events
from tests.e2e.slow_layers import BACKWARD_S, FORWARD_S, equal, train_slowly
from tests.e2e.training import TINY_GPT
from tests.ranks import run_ranks

pytestmark = pytest.mark.matrix

NUM_MICROBATCHES = 8
SETTLED = 4  # the first iterations pay for what is made once
EQUAL, UNEVEN, INTERLEAVED = "Ett|ttL", "Et|t*3L", "Et|t|t|tL"
EQUAL_MS = (NUM_MICROBATCHES + 1) * 2 * (FORWARD_S + BACKWARD_S) * 1e3


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Median iteration time and recorded costs of a real run by its layout."""
    found = {}
    for text in (EQUAL, UNEVEN, INTERLEAVED):
        folder = tmp_path_factory.mktemp("run")
        run_ranks(
            train_slowly,
            2,
            equal,
            *TINY_GPT,
            *("--train-iters", "12", "--global-batch-size", str(NUM_MICROBATCHES)),
            *("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", text),
            *("--dynmo-mode", "observe", "--dynmo-log-dir", str(folder)),
            timeout_s=200,
        )
        file = folder / EVENTS_FILE
        times = [e["iteration_ms"] for e in read_events(file) if e["event"] == "iteration"]
        found[text] = statistics.median(times[SETTLED:]), read_recording(file)
    return found


def layout(text):
    return LayerLayout.from_megatron(text, num_layers=4, num_stages=2)


def test_equal_stages_take_the_closed_form(measured):
    assert measured[EQUAL][0] == pytest.approx(EQUAL_MS, rel=0.10)


@pytest.mark.parametrize("run", [EQUAL, UNEVEN, INTERLEAVED])
@pytest.mark.parametrize("costs_of", [EQUAL, UNEVEN])
def test_a_run_takes_what_the_costs_of_any_run_predict(measured, run, costs_of):
    trace = measured[costs_of][1].trace
    predicted = statistics.median(
        predict_layout_ms(trace.costs_at(row, num_microbatches=NUM_MICROBATCHES), layout(run))
        for row in range(SETTLED, trace.num_iterations)
    )
    assert measured[run][0] == pytest.approx(predicted, rel=0.10)


def test_a_recording_says_which_pipeline_it_is_of(measured):
    shapes = {
        text: (found.num_stages, found.virtual_stages, found.num_microbatches)
        for text, (_, found) in measured.items()
    }
    assert shapes == {EQUAL: (2, 1, 8), UNEVEN: (2, 1, 8), INTERLEAVED: (2, 2, 8)}

"""The vectorised schedules against the one-iteration engine, closed forms and bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynmo.batch_schedule import finish_times
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.pipeline_schedule import time_schedule
from megatron_dynmo.simulate.bounds import balanced_ms, ideal_ms
from megatron_dynmo.simulate.pipeline import Case, Pipeline
from megatron_dynmo.simulate.trace import CostTrace

times = st.integers(0, 20).map(float)


def trace_of(forward, backward, *, memory=1.0, activation=0.0, extra=((0, 0), (0, 0))):
    """A trace of constant extras; forward and backward [iterations, layers]."""
    forward, backward = np.asarray(forward, float), np.asarray(backward, float)
    num_iterations, num_layers = forward.shape
    return CostTrace(
        forward_ms=forward,
        backward_ms=backward,
        memory_bytes=np.broadcast_to(np.asarray(memory, float), forward.shape),
        activation_bytes=np.broadcast_to(np.asarray(activation, float), num_layers),
        parameters=np.ones(num_layers),
        extra_forward_ms=np.tile(np.asarray(extra[0], float), (num_iterations, 1)),
        extra_backward_ms=np.tile(np.asarray(extra[1], float), (num_iterations, 1)),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_row_agrees_with_the_event_engine(data):
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
    num_stages = data.draw(st.integers(1, 6))
    virtual_stages = data.draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    groups = data.draw(st.integers(1, 3))
    num_microbatches = num_stages * groups if schedule == "interleaved" else groups * 3
    p2p_ms = data.draw(st.sampled_from([0.0, 0.5, 7.0]))
    size = 2 * virtual_stages * num_stages * 2
    flat = data.draw(st.lists(times, min_size=size, max_size=size))
    forward, backward = np.array(flat).reshape(2, 2, virtual_stages, num_stages)
    finish = finish_times(schedule, forward, backward, num_microbatches, p2p_ms)
    assert finish.shape == (2, num_stages)
    for row in range(2):
        _, ends = time_schedule(schedule, forward[row], backward[row], num_microbatches, p2p_ms)
        np.testing.assert_allclose(finish[row], ends.max(axis=(0, 2)), rtol=1e-12)


def test_many_rows_are_split_into_blocks_without_a_seam():
    rng = np.random.default_rng(0)
    forward, backward = rng.random((2, 3000, 1, 3))
    together = finish_times("1f1b", forward, backward, 5, 0.1)
    apart = [
        finish_times("1f1b", forward[i : i + 1], backward[i : i + 1], 5, 0.1)[0]
        for i in (0, 1023, 1024, 2999)
    ]
    np.testing.assert_array_equal(together[[0, 1023, 1024, 2999]], apart)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8, 32])
def test_equal_stages_give_the_closed_form(schedule, num_stages, num_microbatches):
    f, b = 3.0, 5.0
    case = Case(
        trace_of(np.full((2, 16), f), np.full((2, 16), b)),
        Pipeline(num_stages, num_microbatches, schedule),
    )
    a_stage = (f + b) * 16 / num_stages
    expected = (num_microbatches + num_stages - 1) * a_stage
    assert case.iteration_ms(case.uniform, slice(None)).tolist() == [expected, expected]
    assert balanced_ms(case.trace, case.pipeline).tolist() == [expected, expected]


def test_equal_chunks_give_the_interleaved_closed_form():
    pipeline = Pipeline(4, 8, "interleaved", 2)
    case = Case(trace_of(np.full((1, 16), 1.0), np.full((1, 16), 2.0)), pipeline)
    a_rank = 3.0 * 16 / 4
    assert case.iteration_ms(case.uniform, slice(None)).tolist() == [(8 + 3 / 2) * a_rank]
    assert balanced_ms(case.trace, pipeline).tolist() == [(8 + 3 / 2) * a_rank]


def test_extras_belong_to_the_first_and_the_last_chunk():
    trace = trace_of(np.ones((1, 4)), np.ones((1, 4)), extra=((5, 7), (11, 13)))
    case = Case(trace, Pipeline(2, 2, "interleaved", 2))
    forward, backward = case.chunk_times(case.uniform, slice(None))
    assert forward.tolist() == [[[6, 1], [1, 8]]]
    assert backward.tolist() == [[[12, 1], [1, 14]]]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_split_of_the_work_beats_the_ideal(data):
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
    num_stages = data.draw(st.integers(1, 7))
    virtual_stages = 2 if schedule == "interleaved" and num_stages > 1 else 1
    num_microbatches = data.draw(st.integers(1, 14))
    if virtual_stages > 1:
        num_microbatches = num_stages * data.draw(st.integers(1, 3))
    pipeline = Pipeline(
        num_stages, num_microbatches, schedule, virtual_stages,
        p2p_ms=data.draw(st.sampled_from([0.0, 0.7])),
    )  # fmt: skip
    num_layers = pipeline.num_chunks
    rows = data.draw(st.lists(times, min_size=2 * num_layers, max_size=2 * num_layers).filter(sum))
    case = Case(trace_of([rows[:num_layers]], [rows[num_layers:]]), pipeline)
    each_a_layer = tuple(range(num_layers + 1))
    ideal = ideal_ms(case.trace, pipeline)[0]
    assert case.iteration_ms(each_a_layer, slice(None))[0] >= ideal * (1 - 1e-9)
    assert balanced_ms(case.trace, pipeline)[0] >= ideal * (1 - 1e-9)


def test_a_front_heavy_split_can_beat_perfect_balance():
    # Two stages, two micro-batches: 4/3 and 2/3 of the work in front and behind take 8/3 where
    # equal stages take 3; the bound knows.
    case = Case(trace_of(np.full((1, 3), 1 / 3), np.full((1, 3), 1 / 3)), Pipeline(2, 2))
    assert case.iteration_ms((0, 2, 3), slice(None))[0] == pytest.approx(8 / 3)
    assert balanced_ms(case.trace, case.pipeline)[0] == pytest.approx(3)
    assert ideal_ms(case.trace, case.pipeline)[0] == pytest.approx(8 / 3)


# ---------------------------------------------------------------- memory and moves


def test_memory_counts_micro_batches_in_flight():
    trace = trace_of(np.ones((1, 4)), np.ones((1, 4)), memory=100.0, activation=1.0)
    one_f_one_b = Case(trace, Pipeline(4, 8))
    assert one_f_one_b.peak_memory_bytes((0, 1, 2, 3, 4), slice(None)).tolist() == [
        104, 103, 102, 101,
    ]  # fmt: skip
    few = Case(trace, Pipeline(4, 2))
    assert few.peak_memory_bytes((0, 1, 2, 3, 4), slice(None)).tolist() == [102, 102, 102, 101]
    gpipe = Case(trace, Pipeline(2, 8, "gpipe"))
    assert gpipe.peak_memory_bytes((0, 1, 4), slice(None)).tolist() == [108, 324]


def test_interleaved_memory_follows_megatrons_warm_up():
    # Rank 0 of 2 with 2 chunks runs 2 (P - 1) + (V - 1) P = 4 warm-up forwards and one more.
    trace = trace_of(np.ones((1, 4)), np.ones((1, 4)), memory=0.0, activation=[1, 1, 10, 10])
    case = Case(trace, Pipeline(2, 4, "interleaved", 2))
    first, second = case.peak_memory_bytes((0, 1, 2, 3, 4), slice(None)).tolist()
    # Chunks of rank 0 are layers 1 and 3. At most three forwards of layer 1 and two of layer 3.
    assert first == 3 * 1 + 2 * 10
    assert second == 2 * 1 + 1 * 10


def test_a_move_costs_the_bytes_of_the_busiest_rank():
    trace = trace_of(np.ones((3, 4)), np.ones((3, 4)), memory=[1e9, 2e9, 4e9, 8e9])
    case = Case(trace, Pipeline(2, 2, move_fixed_ms=50, move_gb_per_s=10))
    move = case.move((0, 2, 4), (0, 3, 4), 1, "why")
    assert (move.iteration, move.layers_moved, move.num_bytes) == (2, 1, 4 * 10**9)
    assert move.cost_ms == 50 + 400
    to_nowhere = case.move((0, 2, 4), (0, 2, 4), 1, "why")
    assert (to_nowhere.layers_moved, to_nowhere.num_bytes, to_nowhere.cost_ms) == (0, 0, 0)


def test_a_layer_that_changes_its_chunk_but_not_its_rank_costs_nothing():
    trace = trace_of(np.ones((1, 4)), np.ones((1, 4)), memory=1e9)
    case = Case(trace, Pipeline(1, 2, "interleaved", 2))
    assert case.move((0, 2, 4), (0, 1, 4), 0, "why").cost_ms == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_stages": 0}, "num_stages is 0"),
        ({"schedule": "zigzag"}, "use one of 1f1b, interleaved, gpipe"),
        ({"schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 5}, "use 4 or 8"),
        ({"virtual_stages": 2}, "interleaved"),
        ({"p2p_ms": -1.0}, "p2p_ms is -1"),
        ({"move_gb_per_s": 0.0}, "above 0"),
    ],
)
def test_impossible_pipelines_say_what_to_change(settings, words):
    with pytest.raises(ConfigError, match=words):
        Pipeline(**{"num_stages": 4, "num_microbatches": 8, **settings})


def test_traces_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match=r"backward_ms has shape \(1, 3\)"):
        trace_of(np.ones((1, 4)), np.ones((1, 3)))
    with pytest.raises(ConfigError, match="finite numbers of at least 0"):
        trace_of([[1.0, -1.0]], [[1.0, 1.0]])
    with pytest.raises(ConfigError, match="use at most 2 chunks"):
        Case(trace_of([[1.0, 1.0]], [[1.0, 1.0]]), Pipeline(4, 8))

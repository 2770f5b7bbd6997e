"""Costs and schedules: closed forms, bounds, and the file they travel in."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynmo.cost import (
    ExtraCost,
    LayerCost,
    ModelCosts,
    bubble_fraction,
    imbalance,
    makespan,
    predict_iteration_ms,
    predict_layout_ms,
    schedule_times,
    stage_costs,
)
from megatron_dynmo.cost_file import costs_from_json, costs_to_json, read_costs, write_costs
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.pipeline_schedule import rank_order, time_schedule, times_1f1b

times = st.integers(0, 20).map(float)


def test_imbalance_and_bubble():
    assert imbalance([2.0, 2.0]) == 0.0
    assert imbalance([3.0, 1.0]) == 0.5
    assert imbalance([0.0, 0.0]) == 0.0
    assert bubble_fraction([6.0, 6.0], [2.0, 2.0]) == 0.25
    assert bubble_fraction([0.0], [0.0]) == 0.0


# ---------------------------------------------------------------- makespan


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 8, 17])
def test_equal_stages_give_the_closed_form(schedule, num_stages, num_microbatches):
    f, b = 3.0, 5.0
    times = schedule_times(schedule, [f] * num_stages, [b] * num_stages, num_microbatches)
    assert times.makespan_ms == (num_microbatches + num_stages - 1) * (f + b)
    assert times.busy_ms == [num_microbatches * (f + b)] * num_stages
    assert times.idle_ms == [(num_stages - 1) * (f + b)] * num_stages
    assert bubble_fraction(times.busy_ms, times.idle_ms) == pytest.approx(
        (num_stages - 1) / (num_microbatches + num_stages - 1)
    )


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("virtual_stages", [1, 2, 5])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_equal_chunks_give_the_interleaved_closed_form(num_stages, virtual_stages, groups):
    f, b, num_microbatches = 3.0, 5.0, groups * num_stages
    nested = [[f] * num_stages] * virtual_stages
    total = makespan("interleaved", nested, [[b] * num_stages] * virtual_stages, num_microbatches)
    assert total == (num_microbatches * virtual_stages + num_stages - 1) * (f + b)
    flat = [f] * (num_stages * virtual_stages)
    again = makespan(
        "interleaved",
        flat,
        [b] * len(flat),
        num_microbatches,
        num_stages=num_stages,
    )
    assert again == total


def test_two_unequal_stages_by_hand():
    # F0 0-1, F1 of stage 1 1-4, B 4-10, B0 10-12; the second micro-batch waits for stage 1:
    # stage 1: F0 1-4, B0 4-10, F1 10-13, B1 13-19; stage 0 ends with B1 19-21.
    times = schedule_times("1f1b", [1.0, 3.0], [2.0, 6.0], 2)
    assert times.makespan_ms == 21.0
    assert times.busy_ms == [6.0, 18.0]
    assert times.idle_ms == [15.0, 3.0]
    assert times.finish_ms == [21.0, 19.0]


def test_latency_is_paid_on_every_hop_of_the_critical_path():
    assert makespan("1f1b", [1.0] * 4, [2.0] * 4, 1, p2p_ms=0.5) == 12.0 + 6 * 0.5
    assert makespan("gpipe", [1.0] * 4, [2.0] * 4, 1, p2p_ms=0.5) == 12.0 + 6 * 0.5
    # Two chunks a rank: 8 chunks, 7 hops each way.
    nested = ([[1.0] * 4] * 2, [[2.0] * 4] * 2)
    assert makespan("interleaved", *nested, 4) < makespan("interleaved", *nested, 4, p2p_ms=0.5)


@settings(max_examples=300)
@given(data=st.data(), num_stages=st.integers(1, 7), num_microbatches=st.integers(1, 12))
def test_the_vector_sweep_equals_the_event_recurrence(data, num_stages, num_microbatches):
    stage_times = st.lists(times, min_size=num_stages, max_size=num_stages)
    forward, backward = np.array(data.draw(stage_times)), np.array(data.draw(stage_times))
    p2p = data.draw(st.sampled_from([0.0, 0.25, 3.0]))
    _, ends = time_schedule("1f1b", forward[None], backward[None], num_microbatches, p2p)
    swept = times_1f1b(forward, backward, num_microbatches, p2p)
    assert swept.tolist() == ends[0].max(axis=-1).tolist()
    batch = times_1f1b(np.stack([forward, 2 * forward]), backward, num_microbatches, p2p)
    assert batch[0].tolist() == swept.tolist()


@settings(max_examples=200)
@given(data=st.data(), num_stages=st.integers(1, 5), virtual_stages=st.integers(1, 3))
def test_makespan_lies_between_its_bounds(data, num_stages, virtual_stages):
    shape = st.lists(
        st.lists(times, min_size=num_stages, max_size=num_stages),
        min_size=virtual_stages,
        max_size=virtual_stages,
    )
    forward, backward = np.array(data.draw(shape)), np.array(data.draw(shape))
    num_microbatches = num_stages * data.draw(st.integers(1, 3))
    result = schedule_times("interleaved", forward, backward, num_microbatches)
    one = (forward + backward).sum()
    assert result.makespan_ms <= num_microbatches * one
    assert result.makespan_ms >= max(one, max(result.busy_ms))
    assert result.makespan_ms == max(result.finish_ms)
    if virtual_stages == 1:
        assert result.makespan_ms == makespan("1f1b", forward[0], backward[0], num_microbatches)


@settings(max_examples=100)
@given(data=st.data(), num_stages=st.integers(1, 5), virtual_stages=st.integers(1, 3))
def test_every_pass_waits_for_its_rank_and_its_input(data, num_stages, virtual_stages):
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    shape = (virtual_stages, num_stages)
    duration = {d: np.array([[rng.randrange(1, 9) for _ in range(num_stages)]
                             for _ in range(virtual_stages)], float)
                for d in ("forward", "backward")}  # fmt: skip
    num_microbatches, p2p = num_stages * 2, 0.5
    forward, backward = time_schedule("interleaved", *duration.values(), num_microbatches, p2p)
    end = {"forward": forward, "backward": backward}
    for rank in range(num_stages):
        free = 0.0
        for direction, vp, mb in rank_order(
            "interleaved", rank, num_stages, num_microbatches, virtual_stages=virtual_stages
        ):
            chunk = vp * num_stages + rank
            source = chunk - 1 if direction == "forward" else chunk + 1
            if 0 <= source < virtual_stages * num_stages:
                free = max(free, end[direction].reshape(-1, num_microbatches)[source, mb] + p2p)
            free += duration[direction][vp, rank]
            assert end[direction][vp, rank, mb] == free
    assert forward.shape == (*shape, num_microbatches)


@pytest.mark.parametrize(
    ("schedule", "rank", "virtual_stages", "expected"),
    [
        ("1f1b", 0, 1, "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3"),
        ("1f1b", 1, 1, "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3"),
        ("gpipe", 1, 1, "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3"),
        (
            "interleaved",
            1,
            2,
            "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3",
        ),
        (
            "interleaved",
            0,
            2,
            "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3",
        ),
    ],
)
def test_orders_written_out(schedule, rank, virtual_stages, expected):
    order = rank_order(schedule, rank, 2, 4, virtual_stages=virtual_stages)
    assert " ".join(f"{kind[0].upper()}{vp}.{mb}" for kind, vp, mb in order) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", [1.0], [1.0], 1), "unknown schedule 'zigzag'; use one of 1f1b"),
        (("1f1b", [1.0, 2.0], [1.0], 1), r"shape \(1, 2\), backward_ms \(1, 1\)"),
        (("1f1b", [1.0, -2.0], [1.0, 1.0], 1), "forward_ms must hold finite times"),
        (("1f1b", [1.0, float("nan")], [1.0, 1.0], 1), "finite"),
        (("gpipe", [[1.0], [1.0]], [[1.0], [1.0]], 1), "one chunk a rank, not 2"),
        (("1f1b", [1.0], [1.0], 0), "0 micro-batches"),
        (("1f1b", [], [], 1), "one time for each stage"),
        (("interleaved", [1.0] * 4, [1.0] * 4, 4), "give num_stages"),
        (("interleaved", [[1.0] * 6] * 2, [[1.0] * 6] * 2, 3), "use 6 or 12 micro-batches"),
        (("interleaved", [[1.0] * 2] * 2, [[1.0] * 2] * 2, 3), "use 2 or 4 micro-batches"),
    ],
)
def test_bad_input_says_what_to_change(arguments, message):
    with pytest.raises(ConfigError, match=message):
        makespan(*arguments)


# ---------------------------------------------------------------- stages and iterations


def model(num_layers: int = 4, **kwargs) -> ModelCosts:
    layers = tuple(
        LayerCost(n, float(n), 2.0 * n, memory_bytes=100 * n, activation_bytes=n, reduce_ms=1.0,
                  optimizer_ms=0.5)
        for n in range(1, num_layers + 1)
    )  # fmt: skip
    return ModelCosts(
        layers,
        first_stage_extra=ExtraCost(0.25, 0.5, memory_bytes=7),
        last_stage_extra=ExtraCost(1.0, 3.0, memory_bytes=9, optimizer_ms=2.0),
        **kwargs,
    )


def test_stage_costs_add_up_layers_and_extras():
    first, last = stage_costs(model(), LayerLayout.from_boundaries([0, 3, 4], num_stages=2))
    assert (first.forward_ms, first.backward_ms, first.memory_bytes) == (6.25, 12.5, 607)
    assert (last.forward_ms, last.backward_ms, last.memory_bytes) == (5.0, 11.0, 409)
    assert (last.activation_bytes, last.reduce_ms, last.optimizer_ms) == (4, 1.0, 2.5)
    assert (first.total_ms, last.total_ms) == (18.75, 16.0)


def test_stage_costs_of_virtual_stages_are_vp_major():
    layout = LayerLayout.even(4, 2, virtual_stages=2)
    stages = stage_costs(model(), layout)
    assert [(s.pp_rank, s.vp_stage) for s in stages] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [s.forward_ms for s in stages] == [1.25, 2.0, 3.0, 5.0]


def test_stage_costs_refuse_another_number_of_layers():
    with pytest.raises(ConfigError, match=r"costs of 4 layers, but the layout Et\*3\|t\*3L has 6"):
        stage_costs(model(), LayerLayout.even(6, 2))


def test_tail_of_late_stages_hides_behind_the_cool_down():
    # Stage 1 ends at 19, stage 0 at 21: two ms of stage 1's reduction cost nothing.
    stages = ("1f1b", [1.0, 3.0], [2.0, 6.0], 2)
    assert predict_iteration_ms(*stages, reduce_ms=[0.0, 2.0]) == 21.0
    assert predict_iteration_ms(*stages, reduce_ms=[0.0, 5.0]) == 24.0
    assert predict_iteration_ms(*stages, reduce_ms=1.0, optimizer_ms=[3.0, 4.0]) == 26.0


def test_iteration_of_a_layout_uses_its_schedule():
    costs = model(num_microbatches=4, p2p_ms=0.125)
    plain = LayerLayout.from_boundaries([0, 3, 4], num_stages=2)
    assert predict_layout_ms(costs, plain) == predict_iteration_ms(
        "1f1b", [6.25, 5.0], [12.5, 11.0], 4, 0.125, reduce_ms=[3.0, 1.0], optimizer_ms=[1.5, 2.5]
    )
    virtual = LayerLayout.even(4, 2, virtual_stages=2)
    assert predict_layout_ms(costs, virtual) == predict_iteration_ms(
        "interleaved",
        [[1.25, 2.0], [3.0, 5.0]],
        [[2.5, 4.0], [6.0, 11.0]],
        4,
        0.125,
        reduce_ms=2.0,
        optimizer_ms=[1.0, 3.0],
    )


# ---------------------------------------------------------------- costs.json


def test_costs_survive_the_file(tmp_path):
    costs = model(num_microbatches=8, p2p_ms=0.5)
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(tmp_path / "costs.json") == costs


def test_only_layer_times_are_required():
    row = {"layer_number": 1, "forward_ms": 1, "backward_ms": 2}
    costs = costs_from_json({"layers": [row], "num_microbatches": 8.0})
    assert costs == ModelCosts((LayerCost(1, 1.0, 2.0),), num_microbatches=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["layers"][1].update(forward_ms=-1.0), r"layers\[1\]\.forward_ms is -1\.0"),
        (lambda d: d["layers"][1].update(forward_ms="3"), r"layers\[1\]\.forward_ms is '3'"),
        (lambda d: d["layers"][1].update(forward_ms=True), r"forward_ms is True"),
        (lambda d: d["layers"][1].update(backward_ms=float("nan")), r"backward_ms is nan"),
        (
            lambda d: d["layers"][1].update(memory_bytes=1.5),
            r"memory_bytes is 1.5, must be a whole",
        ),
        (lambda d: d["layers"][1].update(layer_number=7), r"layer_number is 7, must be 2"),
        (lambda d: d["layers"][1].update(forwardms=7), r"unknown forwardms; known: layer_number"),
        (lambda d: d["layers"][0].pop("backward_ms"), r"layers\[0\] lacks backward_ms"),
        (lambda d: d["layers"].insert(0, 3), r"layers\[0\] must be an object, is int"),
        (lambda d: d.update(layers=[]), "at least one layer"),
        (lambda d: d.update(first_stage_extra=1.0), "first_stage_extra must be an object"),
        (lambda d: d["last_stage_extra"].update(memory_bytes=-1), r"last_stage_extra.memory_bytes"),
        (lambda d: d.update(num_microbatches=0), "num_microbatches is 0, .* at least 1"),
        (lambda d: d.update(layer=[]), "the document has unknown layer"),
    ],
)
def test_a_bad_file_names_the_field(tmp_path, change, message):
    document = costs_to_json(model())
    change(document)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message) as caught:
        read_costs(path)
    assert str(path) in str(caught.value)


def test_a_missing_or_broken_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read costs from .*No such file"):
        read_costs(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_costs(tmp_path / "broken.json")

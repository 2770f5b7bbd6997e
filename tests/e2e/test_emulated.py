"""Emulated devices under real Megatron: times as the closed form says, read back exactly.

All costs are multiples of a power of two and all speeds powers of two, so sums of them are exact in
floating point and times can be compared with `==`.
"""

import pytest

from megatron_dynmo.emulate.emulation_file import emulation_from_json
from megatron_dynmo.layout import LayerLayout
from tests.e2e.emulation import MESSAGE_BYTES, drop_in, of_kind, run_emulated
from tests.e2e.training import TINY_GPT
from tests.ranks import RanksFailed, run_ranks

LINK = {"latency_ms": 0.125, "bandwidth_gb_s": 0.000512}  # a message takes 0.125 + 0.5 ms
EVERY_ITERATION = ("--dynmo-window", "1")
EDGES = {
    "first_stage_extra": {"forward_ms": 0.5, "backward_ms": 0.25, "reduce_ms": 0.5},
    "last_stage_extra": {"forward_ms": 1.5, "backward_ms": 3.0, "optimizer_ms": 0.5},
}
LAYER = {
    "forward_ms": 1.0,
    "backward_ms": 2.5,
    "reduce_ms": 0.125,
    "optimizer_ms": 0.25,
    "memory_bytes": 4_000_000,
}


def equal_model(num_layers):
    """Layers that all cost the same, without anything else."""
    return {
        "num_layers": num_layers,
        "every_layer": {"forward_ms": 1.0, "backward_ms": 2.0},
        "migration": "measured",
    }


def uneven_model(num_layers):
    """Two heavy layers, edges, a slow rank, a link and an optimizer."""
    return {
        "num_layers": num_layers,
        "every_layer": LAYER,
        "layers": [
            {"layer_number": 3, "forward_ms": 2.0, "backward_ms": 3.25},
            {"layer_number": num_layers - 1, "scale": 2},
        ],
        **EDGES,
        "optimizer_ms": 1.0,
        "speeds": {"1": 0.5},
        "link": LINK,
        "migration": {"bandwidth_gb_s": 1.0, "rebuild_ms": 16.0},
    }


def changing_model(num_layers):
    """A model whose costs change in every way that a file can write."""
    document = uneven_model(num_layers)
    document["layers"] = [
        {"layer_number": 1, "scale": {"kind": "step", "from": {"1": 1, "4": 3}}},
        {
            "layer_number": 2,
            "scale": {
                "kind": "ramp",
                "first_iteration": 1,
                "last_iteration": 5,
                "before": 1,
                "after": 3,
            },
        },
        {
            "layer_number": 3,
            "scale": {"kind": "oscillation", "low": 1, "high": 2, "period_iters": 2},
        },
        {"layer_number": 4, "forward_ms": [1, 2, 4, 8]},
    ]
    document["speeds"] = {"2": {"kind": "step", "from": {"1": 1, "3": 0.5, "5": 1}}}
    return document


def layout_of(sizes):
    """Layout string of these numbers of layers by chunk, vp-major."""
    return "E" + "|".join("t" * size for size in sizes) + "L"


def check(folder, document, sizes, num_stages, num_microbatches, *flags):
    """Run a few iterations and compare every one with the closed form."""
    layout, num_layers = layout_of(sizes), sum(sizes)
    events = run_emulated(
        folder,
        document,
        layout,
        "--dynmo-mode",
        "observe",
        *flags,
        num_stages=num_stages,
        num_layers=num_layers,
        num_microbatches=num_microbatches,
        iterations=2,
    )
    expected = emulation_from_json(document).predict_ms(
        LayerLayout.from_megatron(layout, num_layers=num_layers, num_stages=num_stages),
        1,
        num_microbatches,
        MESSAGE_BYTES,
    )
    assert [event["iteration_ms"] for event in of_kind(events, "iteration")] == [expected] * 2
    return expected


class TestAgreesWithTheClosedForm:
    @pytest.mark.matrix
    def test_1f1b_of_equal_stages(self, tmp_path):
        # (M + P - 1)(f + b) with two layers on each stage.
        assert check(tmp_path, equal_model(8), [2] * 4, 4, 6) == (6 + 4 - 1) * (2.0 + 4.0)

    @pytest.mark.matrix
    def test_interleaved_of_uneven_stages(self, tmp_path):
        check(tmp_path, uneven_model(12), [1, 3, 1, 1, 2, 0, 3, 1], 4, 8)

    @pytest.mark.matrix
    @pytest.mark.parametrize("model", [equal_model, uneven_model])
    @pytest.mark.parametrize("num_stages", [4, 8, 16])
    @pytest.mark.parametrize("virtual_stages", [1, 2])
    def test_table(self, tmp_path, num_stages, virtual_stages, model):
        sizes = [1] * (num_stages * virtual_stages)
        if model is uneven_model:
            sizes[0], sizes[1], sizes[-2] = 3, 0, 2
        check(tmp_path, model(sum(sizes)), sizes, num_stages, num_stages)

    @pytest.mark.matrix
    def test_more_micro_batches_than_a_group_and_overlapped_warm_up(self, tmp_path):
        flags = ("--microbatch-group-size-per-virtual-pipeline-stage", "4")
        flush = ("--overlap-p2p-communication-warmup-flush",)
        sizes = [1, 3, 1, 1, 2, 0, 3, 1]
        check(tmp_path / "plain", uneven_model(12), sizes, 4, 12, *flags)
        check(tmp_path / "flush", uneven_model(12), sizes, 4, 12, *flags, *flush)


@pytest.fixture(scope="class")
def moved(tmp_path_factory):
    """Runs of a changing model with a move: the emulated one, the same again, and a real one."""
    start, target = layout_of([2, 2, 2, 2]), layout_of([1, 1, 3, 3])
    shape = {"num_stages": 4, "num_layers": 8, "num_microbatches": 5, "iterations": 6}
    flags = ("--dynmo-force-layout", f"2:{target}", "--dynmo-digest-interval", "6")
    flags += EVERY_ITERATION
    document = changing_model(8)
    root = tmp_path_factory.mktemp("emulated")

    def run(name, is_emulated=True):
        return run_emulated(
            *(root / name, document, start, *flags),
            **shape,
            is_emulated=is_emulated,
            timeout_s=120,
        )

    events = run("a")
    layouts = [
        LayerLayout.from_megatron(text, num_layers=8, num_stages=4) for text in (start, target)
    ]
    speech = (root / "a" / "ranks" / "rank3.log").read_text()
    return emulation_from_json(document), layouts, events, speech, run


class TestAChangingModelThatMoves:
    def test_every_iteration_takes_what_the_closed_form_says(self, moved):
        emulation, layouts, events, *_ = moved
        found = {
            event["iteration"]: event["iteration_ms"] for event in of_kind(events, "iteration")
        }
        assert found == {
            iteration: emulation.predict_ms(layouts[iteration > 2], iteration, 5, MESSAGE_BYTES)
            for iteration in range(1, 7)
        }
        assert len(set(found.values())) == 6

    def test_profiler_reads_the_emulated_times_back(self, moved):
        emulation, layouts, events, *_ = moved
        profiles = of_kind(events, "profile")
        # The first iteration and the first after a move are not counted.
        assert [event["iteration"] for event in profiles] == [4, 5, 6]
        for event in profiles:
            iteration = event["iteration"]
            costs = emulation.costs(iteration, 5)
            for found, wanted in zip(event["layers"], costs.layers, strict=True):
                pp_rank, _ = layouts[1].owner_of(wanted.layer_number)
                speed = emulation.speed(pp_rank, iteration)
                assert found["forward_ms"] == wanted.forward_ms / speed
                assert found["backward_ms"] == wanted.backward_ms / speed
            for name in ("first_stage_extra", "last_stage_extra"):
                assert event[name]["forward_ms"] == getattr(costs, name).forward_ms
                assert event[name]["backward_ms"] == getattr(costs, name).backward_ms
            assert event["num_microbatches"] == 5

    def test_a_move_is_charged_at_the_stated_bandwidth(self, moved):
        _, _, events, *_ = moved
        (move,) = of_kind(events, "migration")
        # Layers 2 and 3 leave rank 0 and 1, which keep one each; rank 2 takes in layers 3 and 4
        # and lets layer 6 go: two layers of 4 MB at 1 GB/s, and 16 ms to rebuild.
        assert move["layers_moved"] == [2, 3, 4, 6]
        assert move["duration_ms"] == 16.0 + 8.0

    @pytest.mark.matrix
    def test_two_runs_give_the_same_numbers(self, moved):
        *_, events, _, run = moved
        assert numbers_of(run("b")) == numbers_of(events)

    @pytest.mark.matrix
    def test_training_is_not_touched(self, moved):
        *_, events, _, run = moved
        plain = run("plain", is_emulated=False)
        assert not any("emulated" in event for event in plain)
        for name in ("lm_loss_hex", "grad_norm_hex"):
            emulated_run = [event[name] for event in of_kind(events, "iteration")]
            assert emulated_run == [event[name] for event in of_kind(plain, "iteration")]
            assert len(set(emulated_run)) == 6
        digests = [of_kind(run, "digest")[0] for run in (events, plain)]
        assert digests[0]["layers"] == digests[1]["layers"] and len(digests[0]["layers"]) == 8

    def test_says_emulated_everywhere(self, moved):
        *_, events, speech, _ = moved
        assert all(event["emulated"] is True for event in events)
        lines = [line for line in speech.splitlines() if line.startswith(" dynmo ")]
        assert len(lines) >= 5
        assert all(line.split(" | ")[1] == "emulated" for line in lines)


def numbers_of(events):
    """The events without what real time or real memory is in."""
    real = ("time_s", "peak_memory_bytes")
    return [{k: v for k, v in event.items() if k not in real} for event in events]


@pytest.mark.matrix
def test_a_measured_move_is_charged_its_real_duration(tmp_path):
    events = run_emulated(
        tmp_path,
        equal_model(4),
        "Ett|ttL",
        *("--dynmo-force-layout", "1:Et|tttL"),
        num_stages=2,
        num_layers=4,
        num_microbatches=2,
        iterations=2,
    )
    (move,) = of_kind(events, "migration")
    assert move["duration_ms"] > 0.1  # connecting, sending and rebuilding in no less than that
    assert [event["iteration_ms"] for event in of_kind(events, "iteration")] == [18.0, 21.0]


@pytest.mark.matrix
def test_a_file_of_another_model_is_refused_in_one_line(tmp_path):
    file = tmp_path / "emulation.json"
    file.write_text('{"num_layers": 5, "migration": "measured"}')
    flags = ("--pipeline-model-parallel-size", "2", "--dynmo-emulate", str(file))
    with pytest.raises(RanksFailed) as failed:
        run_ranks(drop_in, 2, *TINY_GPT, *flags)
    assert f"{file} describes 5 layers, the model has 4" in str(failed.value)

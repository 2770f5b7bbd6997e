"""`dynmo plan --costs`: cases from practice, in unit costs and as measured."""

import json
from itertools import pairwise

import pytest

from megatron_dynmo.__main__ import main
from megatron_dynmo.layout import LayerLayout

# Unit costs of real models: (u per layer, first extra, last extra, stages, optimum in u).
CARDS = {
    "DeepSeek-V3 on 16": ([0.6] * 3 + [1.0] * 58, 0.1, 1.4, 16, 4.0),
    "DeepSeek-V3 on 4": ([0.6] * 3 + [1.0] * 58, 0.1, 1.4, 4, 15.9),
    "GLM-4.5": ([0.6] * 3 + [1.0] * 89, 0.1, 1.2, 8, 12.0),
    "GLM-4.5-Air": ([0.6] + [1.0] * 45, 0.1, 1.2, 4, 12.0),
    "Llama-3-70B": ([1.0] * 80, 0.1, 1.0, 8, 11.0),
}


def costs_of(units, first=0.0, last=0.0, **others):
    return {
        "layers": [
            {"layer_number": n, "forward_ms": u, "backward_ms": 2 * u}
            for n, u in enumerate(units, 1)
        ],
        "first_stage_extra": {"forward_ms": first, "backward_ms": 2 * first},
        "last_stage_extra": {"forward_ms": last, "backward_ms": 2 * last},
    } | others


@pytest.fixture
def plan(tmp_path, capsys):
    def run(document, *words, status=0):
        path = tmp_path / "costs.json"
        path.write_text(json.dumps(document))
        assert main(["plan", "--costs", str(path), *map(str, words)]) == status
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in words else out

    return run


def error_of(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *map(str, words)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def sizes(result):
    return [end - begin for begin, end in pairwise(result["boundaries"])]


def loads(result):
    return [stage["forward_ms"] for stage in result["stages"]]


@pytest.mark.parametrize("num_microbatches", [None, 64, 256])
@pytest.mark.parametrize("name", CARDS)
def test_real_cards_in_unit_costs_reach_the_optimum(plan, name, num_microbatches):
    units, first, last, stages, optimum = CARDS[name]
    others = {} if num_microbatches is None else {"num_microbatches": num_microbatches}
    document = costs_of(units, first, last, **others)
    result = plan(document, "--stages", stages, "--json")
    assert max(loads(result)) == pytest.approx(optimum)
    assert sum(sizes(result)) == len(units)
    assert all(stage["backward_ms"] == 2 * stage["forward_ms"] for stage in result["stages"])
    parsed = LayerLayout.from_megatron(result["layout"], num_layers=len(units), num_stages=stages)
    assert parsed.boundaries == result["boundaries"]
    mean = (sum(units) + first + last) / stages
    assert result["imbalance"] == pytest.approx(optimum / mean - 1)
    assert result["lower_bound_ms"] <= result["iteration_ms"] * (1 + 1e-12)
    assert result["stage_lower_bound_ms"] == pytest.approx(3 * optimum)


def test_the_document_is_the_agreed_one(plan):
    result = plan(costs_of([1.0] * 8, num_microbatches=8), "--stages", 2, "--json")
    agreed = {
        "layout", "boundaries", "stages", "imbalance", "bubble_fraction", "iteration_ms",
        "lower_bound_ms",
    }  # fmt: skip
    assert agreed <= set(result)
    assert {"pp_rank", "forward_ms", "backward_ms", "memory_bytes"} <= set(result["stages"][0])
    assert result["layout"] == "Et*4|t*4L"
    assert result["iteration_ms"] == (8 + 1) * 12
    assert result["bubble_fraction"] == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("name", "current", "gain_pct"),
    [
        ("GLM-4.5", "10,12x6,10", 0.0),
        ("Llama-3-70B", "10x8", 0.0),
        ("DeepSeek-V3 on 4", "16,16,16,13", 0.6),
        ("DeepSeek-V3 on 16", "3,4x14,2", 0.0),
    ],
)
def test_it_says_when_nothing_is_to_be_gained(plan, name, current, gain_pct):
    units, first, last, stages, _ = CARDS[name]
    document = costs_of(units, first, last, num_microbatches=512)
    words = ("--stages", stages, "--current", current)
    result = plan(document, *words, "--json")
    assert result["gain_pct"] == pytest.approx(gain_pct, abs=0.15)
    assert result["advice"] == "stay"
    text = plan(document, *words)
    assert "nothing to gain" in text
    assert "stay with the present layout" in text


def test_ties_stay_with_the_present_layout(plan):
    units, first, last, stages, _ = CARDS["GLM-4.5"]
    document = costs_of(units, first, last, num_microbatches=512)
    result = plan(document, "--stages", stages, "--current", "10,12x6,10", "--json")
    assert sizes(result) == [10, 12, 12, 12, 12, 12, 12, 10]


def test_a_gain_comes_with_the_flag_to_use(plan):
    document = costs_of([1.0] * 40 + [3.0] * 40, num_microbatches=64)
    text = plan(document, "--stages", 8)
    assert "gain" in text
    layout = plan(document, "--stages", 8, "--json")["layout"]
    assert f"--pipeline-model-parallel-layout '{layout}'" in text


def test_42_layers_on_16_stages_leave_none_empty(plan):
    result = plan(costs_of([1.0] * 42, num_microbatches=64), "--stages", 16, "--json")
    assert sorted(sizes(result)) == [2] * 6 + [3] * 10


def test_80_layers_on_32_chunks(plan):
    words = ("--stages", 16, "--virtual-stages", 2, "--json")
    result = plan(costs_of([1.0] * 80, num_microbatches=64), *words)
    assert sum(sizes(result)) == 80
    assert set(sizes(result)) == {2, 3}
    assert [stage["layers"] for stage in result["stages"]] == [5] * 16
    assert result["imbalance"] == 0.0
    assert result["lower_bound_ms"] <= result["iteration_ms"]


def test_78_layers_measured_on_4_stages(plan):
    # Measured at 19.1, 25.6, 25.6 and 29.7 % of the work with 16, 20, 20 and 22 layers: 1.28 % a
    # layer, 3 dense ones of 0.768 %, and an output layer of 1.54 %.
    u = 1.28
    document = costs_of(
        [0.6 * u] * 3 + [u] * 75, 19.1 - 0.6 * u * 3 - 13 * u, 29.7 - 22 * u, num_microbatches=64
    )
    result = plan(document, "--stages", 4, "--current", "16,20,20,22", "--json")
    present = [stage["share"] for stage in result["current"]["stages"]]
    assert present == pytest.approx([0.191, 0.256, 0.256, 0.297])
    assert all(abs(stage["share"] - 0.25) <= u / 100 for stage in result["stages"])
    assert result["imbalance"] == pytest.approx(max(loads(result)) / 25 - 1)
    assert result["imbalance"] <= u / 25
    assert result["gain_pct"] > 10
    text = plan(document, "--stages", 4, "--current", "16,20,20,22")
    assert f"imbalance {result['imbalance']:.1%}" in text
    assert result["layout"] in text


def test_one_layer_can_stand_alone(plan):
    document = costs_of([10, 1, 1, 1], num_microbatches=8)
    result = plan(document, "--stages", 2, "--json")
    assert result["boundaries"] == [0, 1, 4]
    (finding,) = [line for line in result["findings"] if line.startswith("layer 1")]
    assert "more than the mean stage of 19.5" in finding


def test_an_output_layer_above_the_mean_stage_is_named(plan):
    document = costs_of([1.0] * 8, 0.0, 6.0, num_microbatches=16)
    result = plan(document, "--stages", 4, "--json")
    assert "the output layer with its loss takes 18 ms" in result["findings"][0]
    assert "tensor-parallel" in result["findings"][0]
    assert any("--min-layers 0" in line for line in result["findings"])
    alone = plan(document, "--stages", 4, "--min-layers", 0, "--json")
    assert sizes(alone)[-1] == 0
    assert alone["iteration_ms"] < result["iteration_ms"]


def test_virtual_stages_are_suggested_when_whole_layers_are_too_coarse(plan):
    # Two chunks of 3 + 4 and 3 + 2 make 7 and 5; in turn, 3 + 3 and 4 + 2 are 6 and 6.
    document = costs_of([3.0, 4.0, 3.0, 2.0], num_microbatches=32)
    result = plan(document, "--stages", 2, "--json")
    assert "slowest stage at least 16.7 % above the mean" in result["findings"][0]
    assert "2 virtual stages" in result["findings"][1]
    finer = plan(document, "--stages", 2, "--virtual-stages", 2, "--json")
    assert finer["layout"] in result["findings"][1]
    assert finer["imbalance"] == 0.0
    assert finer["iteration_ms"] < result["iteration_ms"] * 0.98
    assert not plan(costs_of([1.0] * 8, num_microbatches=32), "--stages", 4, "--json")["findings"]


def test_no_number_of_micro_batches_is_an_assumption_and_few_are_named(plan):
    result = plan(costs_of([1.0] * 8), "--stages", 4, "--json")
    assert result["num_microbatches"] == 16
    assert "16 micro-batches" in result["assumptions"][0]
    few = plan(costs_of([1.0] * 8), "--stages", 4, "--microbatches", 2, "--json")
    assert few["num_microbatches"] == 2
    assert "2 micro-batches on 4 stages" in few["findings"][0]


def test_memory_cap(plan, capsys, tmp_path):
    document = costs_of([1.0] * 8, num_microbatches=8)
    for layer in document["layers"]:
        layer |= {"memory_bytes": 10**9, "activation_bytes": 10**8}
    document["last_stage_extra"]["memory_bytes"] = 2 * 10**9
    # Stage 0 of 2 holds two micro-batches, so 1.2 GB a layer; the last one 1.1 GB.
    free = plan(document, "--stages", 2, "--json")
    assert [stage["memory_bytes"] for stage in free["stages"]] == [4_800_000_000, 6_400_000_000]
    capped = plan(document, "--stages", 2, "--memory-cap-gb", 6, "--json")
    assert sizes(capped) == [5, 3]
    path = tmp_path / "costs.json"
    words = ("--costs", path, "--stages", 2)
    assert "no split fits in memory" in error_of(capsys, *words, "--memory-cap-gb", 5)
    # Interleaved, rank 0 of 2 with 2 chunks has five passes of two layers in flight.
    virtual = plan(document, "--stages", 2, "--virtual-stages", 2, "--json")
    assert virtual["stages"][0]["memory_bytes"] == 4 * 10**9 + 5 * 2 * 10**8
    assert "fits in memory" in error_of(
        capsys, *words, "--virtual-stages", 2, "--memory-cap-gb", 5.2
    )


def test_the_table_shows_stages_and_chunks(plan):
    text = plan(costs_of([1.0] * 8, num_microbatches=8), "--stages", 2, "--virtual-stages", 2)
    lines = text.splitlines()
    assert lines[0] == "layout Ett|tt|tt|ttL"
    assert lines[1].split() == "stage layers of them forward ms backward ms share".split()
    assert lines[2].split() == ["0", "4", "2+2", "4", "8", "50.0%"]


def test_costs_can_be_written_and_read_again(plan, tmp_path):
    document = costs_of([1.0, 2.0, 3.0], num_microbatches=8)
    path = tmp_path / "again.json"
    plan(document, "--stages", 2, "--write-costs", path)
    again = json.loads(path.read_text())
    assert [layer["forward_ms"] for layer in again["layers"]] == [1.0, 2.0, 3.0]
    assert main(["plan", "--costs", str(path), "--stages", "2"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --costs FILE, --model FILE, or Megatron's arguments behind --"),
        (("--costs", "nowhere.json", "--stages", "2"), "cannot read costs from nowhere.json"),
        (("--costs", "COSTS"), "give --stages P"),
        (("--costs", "COSTS", "--stages", "0"), "--stages 0: at least 1"),
        (
            ("--costs", "COSTS", "--stages", "5"),
            "4 layers cannot give each of 5 stages at least 1; use at most 4 chunks, or "
            "--min-layers 0",
        ),
        (
            ("--costs", "COSTS", "--stages", "2", "--virtual-stages", "3"),
            "each of 2 stages x 3 virtual at least 1",
        ),
        (("--costs", "COSTS", "--stages", "2", "--memory-cap-gb", "-1"), "--memory-cap-gb -1"),
        (("--costs", "COSTS", "--stages", "2", "--current", "3,2"), "5 of 4 layers"),
        (("--costs", "COSTS", "--stages", "2", "--current", "Ettt|L"), "3 of 4 layers"),
        (("--costs", "COSTS", "--stages", "2", "--current", "1,1,1,1", "--virtual-stages", "1"),
         "current layout"),
        (("--costs", "COSTS", "--stages", "2", "--virtual-stages", "2", "--microbatches", "3"),
         "use 2 or 4 micro-batches"),
        (("--costs", "COSTS", "--stages", "2", "--check", "2,2", "--current", "2,2"), "one of"),
        (("--costs", "COSTS", "--stages", "2", "--", "--num-layers", "4"), "exclude each other"),
        (("--stages", "2", "--hidden-size", "8"), "Megatron's arguments go behind --"),
        (("--check", "2,2", "--stages", "2"), "needs --num-layers N"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(capsys, tmp_path, words, message):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs_of([1.0] * 4, num_microbatches=8)))
    words = [str(path) if word == "COSTS" else word for word in words]
    assert message in error_of(capsys, *words)

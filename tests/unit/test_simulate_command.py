"""`dynmo simulate` and its input from a recorded run."""

import json
import subprocess
import sys

import pytest

from megatron_dynmo.__main__ import main
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.recorded import read_recording

SMALL = ("--layers", "8", "--stages", "2", "--microbatches", "4", "--iterations", "20")
POLICIES = [
    "static",
    "static-parameters",
    "best-static",
    "paper-partition",
    "paper-diffusion",
    "ours",
    "balanced",
    "ideal",
]


def profile(iteration, forward, **others):
    layers = [
        {
            "layer_number": number,
            "forward_ms": ms,
            "backward_ms": 2 * ms,
            "memory_bytes": 1000,
            "activation_bytes": 10,
        }
        for number, ms in enumerate(forward, 1)
    ]
    event = {
        "iteration": iteration,
        "event": "profile",
        "time_s": 0.0,
        "layers": layers,
        "stages": [{"pp_rank": rank, "vp_stage": 0} for rank in (0, 1)],
        "last_stage_extra": {"forward_ms": 0.5, "backward_ms": 1.0},
        "num_microbatches": 4,
    }
    return event | others


@pytest.fixture
def events(tmp_path):
    def write(*lines):
        path = tmp_path / "events.jsonl"
        path.write_text(
            "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        )
        return path

    return write


def output_of(capsys, *words):
    assert main(["simulate", *map(str, words)]) == 0
    return capsys.readouterr().out


def error_of(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *map(str, words)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# ---------------------------------------------------------------- the command


def test_json_has_one_object_for_each_policy(capsys):
    result = json.loads(output_of(capsys, "freezing", *SMALL, "--json"))
    assert result["kind"] == "simulated"
    assert result["source"]["scenario"] == "freezing"
    assert result["source"]["settings"]["final_fraction"] == 0.75
    assert (result["num_layers"], result["num_iterations"]) == (8, 20)
    assert [policy["policy"] for policy in result["policies"]] == POLICIES
    by_name = {policy["policy"]: policy for policy in result["policies"]}
    for policy in result["policies"]:
        assert len(policy["iteration_ms"]) == 20
        assert 0 < policy["fraction_of_ideal"] <= 1
        total = sum(policy["iteration_ms"]) + policy["moving_ms"]
        assert policy["total_ms"] == pytest.approx(total)
        assert policy["gpu_hours"] == pytest.approx(total / 3.6e6 * 2)
        ratio = by_name["static"]["total_ms"] / policy["total_ms"]
        assert policy["speedup_vs_static"] == pytest.approx(ratio)
    assert by_name["static"]["layouts"] == [{"iteration": 1, "layout": "Et*4|t*4L"}]
    moved = by_name["paper-partition"]["moves"]
    assert moved and moved[0]["from"] == "Et*4|t*4L" and moved[0]["reason"]


def test_the_same_words_give_the_same_answer(capsys):
    one, two = (output_of(capsys, "moe", *SMALL, "--json", "--seed", "5") for _ in range(2))
    assert one == two
    assert one != output_of(capsys, "moe", *SMALL, "--json", "--seed", "6")


def test_the_table_says_that_it_is_simulated(capsys):
    text = output_of(capsys, "pruning", *SMALL)
    assert "(simulated)" in text
    for policy in POLICIES:
        assert policy in text


def test_virtual_stages_are_interleaved(capsys):
    result = json.loads(output_of(capsys, "pruning", *SMALL, "--virtual-stages", "2", "--json"))
    assert result["pipeline"]["schedule"] == "interleaved"
    assert result["policies"][0]["layouts"][0]["layout"] == "Ett|tt|tt|ttL"


def test_settings_and_cap_reach_the_simulation(capsys):
    words = ("freezing", *SMALL, "--set", "final-fraction=0.5", "--memory-cap-gb", "0.5")
    result = json.loads(output_of(capsys, *words, "--json"))
    assert result["source"]["settings"]["final_fraction"] == 0.5
    assert result["pipeline"]["memory_cap_bytes"] == 5e8
    assert "! holds more than the 0.5 GB allowed" in output_of(capsys, *words)


def test_plots(capsys, tmp_path):
    png, html = tmp_path / "a.png", tmp_path / "a.html"
    output_of(capsys, "pruning", *SMALL, "--plot", png)
    assert png.read_bytes().startswith(b"\x89PNG")
    output_of(capsys, "pruning", *SMALL, "--plot", html)
    page = html.read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page and "ours" in page
    # Self-contained: nothing is loaded from elsewhere.
    assert "<script" not in page and "<img" not in page and "<link" not in page
    first = html.read_bytes()
    output_of(capsys, "pruning", *SMALL, "--plot", html)
    assert html.read_bytes() == first


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give a scenario"),
        (["pruning", "--events", "x"], "not both"),
        (["prunning"], "did you mean pruning?"),
        (["pruning", "--set", "begin"], "write NAME=VALUE"),
        (["pruning", "--set", "begn=1"], "did you mean begin?"),
        (["pruning", "--layers", "4"], "use at most 4 chunks"),
        (["pruning", "--iterations", "0"], "--iterations 0"),
        (["pruning", "--seed", "-1"], "--seed -1"),
        (["pruning", "--stages", "0"], "num_stages is 0"),
        (["pruning", "--paper-interval", "0"], "at least 1"),
        (["pruning", "--paper-gamma", "-1"], "--paper-gamma -1"),
        (["pruning", "--plot", "a.pdf"], ".png or .html"),
        (["pruning", "--plot", "no/such/a.png"], "there is no folder"),
        (["pruning", "--virtual-stages", "2", "--microbatches", "12"], "use 8 or 16"),
        (["pruning", "--schedule", "zigzag"], "1f1b, interleaved, gpipe"),
        (["--events", "no-such-file"], "No such file"),
        (["--events", "no-such-file", "--layers", "3"], "--layers is for scenarios"),
    ],
)
def test_mistakes_are_one_line_with_a_remedy(capsys, words, text):
    assert text in error_of(capsys, *words)


# ---------------------------------------------------------------- recorded runs


def test_a_recorded_run_is_simulated_on_its_own_pipeline(capsys, events):
    path = events(
        profile(3, [1.0, 1.0, 1.0, 1.0]),
        profile(8, [4.0, 1.0, 1.0, 1.0]),
        {"iteration": 12, "event": "iteration", "time_s": 1.0, "iteration_ms": 5.0},
    )
    result = json.loads(output_of(capsys, "--events", path, "--json"))
    assert (result["first_iteration"], result["num_iterations"]) == (3, 10)
    assert result["pipeline"]["num_stages"] == 2
    static = result["policies"][0]["iteration_ms"]
    # Stage 0 holds 6 ms a micro-batch, stage 1 with the output layer 7.5: 4 x 7.5 + 6.
    assert static[:5] == pytest.approx([36.0] * 5)
    # Then stage 0 holds 5 + 10 ms: 4 x 15 + stage 1 on the last micro-batch's way, hidden before.
    assert static[5:] == pytest.approx([static[5]] * 5)
    assert static[5] > 60
    other = json.loads(output_of(capsys, "--events", path, "--stages", "4", "--json"))
    assert other["pipeline"]["num_stages"] == 4


def test_a_half_line_at_the_end_is_skipped(events):
    path = events(profile(1, [1.0, 2.0]), '{"iteration": 2, "event": "prof')
    assert read_recording(path).trace.num_iterations == 1


def test_the_sum_of_an_extra_serves_where_its_parts_are_not_recorded(events):
    event = profile(1, [1.0, 2.0], last_stage_extra_ms=3.0)
    del event["last_stage_extra"], event["num_microbatches"], event["stages"]
    recording = read_recording(events(event))
    assert recording.trace.extra_forward_ms.tolist() == [[0.0, 3.0]]
    assert (recording.num_stages, recording.num_microbatches) == (None, None)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"iteration": 1, "event": "iteration"}], "has no profile event"),
        (["not json\n", "{}\n"], "line 1 is not JSON"),
        (["[]\n"], "line 1 holds list"),
        ([profile("x", [1.0])], "iteration is 'x'"),
        ([profile(1, [])], "at least one layer"),
        ([profile(1, [-1.0])], "forward_ms is -1"),
        ([profile(1, [1.0], layers=[{"layer_number": 2}])], "layer_number 2"),
        ([profile(1, [1.0]), profile(2, [1.0, 1.0])], "line 2: 2 layers after 1"),
    ],
)
def test_events_that_cannot_be_used(events, lines, words):
    with pytest.raises(ConfigError, match=words):
        read_recording(events(*lines))


def test_missing_shape_is_asked_for(capsys, events):
    event = profile(1, [1.0, 2.0])
    del event["num_microbatches"], event["stages"]
    path = events(event)
    assert "give --stages" in error_of(capsys, "--events", path)
    assert "give --microbatches" in error_of(capsys, "--events", path, "--stages", 2)


def test_simulating_needs_neither_torch_nor_megatron():
    code = (
        "import sys\n"
        "sys.modules.update(torch=None, megatron=None)\n"
        "from megatron_dynmo.__main__ import main\n"
        "sys.exit(main(['simulate', 'moe', '--layers', '4', '--stages', '2', "
        "'--iterations', '5', '--json']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["policies"]) == len(POLICIES)

"""`dynmo plan --check`: is a layout legal, and who gets what."""

import json

import pytest

from megatron_dynmo.__main__ import main
from megatron_dynmo.errors import LayoutError
from megatron_dynmo.planner.layout_text import parse_layout
from tests.unit.test_plan_costs import costs_of


def check(capsys, layout, num_layers, stages, *more):
    words = ["--check", layout, "--num-layers", str(num_layers), "--stages", str(stages)]
    status = main(["plan", *words, *map(str, more)])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "sums"),
    [
        ("Et|(tt|)*30L", [3, *[4] * 14, 2]),
        ("Et|(tt|)*29tt|L", [3, *[4] * 14, 2]),
        ("Et|(tt|)*29L|", None),
        ("Et|(tt|)*29|L", None),
        ("Et|(tt|)*28t|t|L", None),
    ],
)
def test_61_layers_in_32_chunks(capsys, layout, sums):
    status, out = check(capsys, layout, 61, 16, "--json")
    result = json.loads(out)
    assert result["legal"] is (sums is not None)
    if sums is None:
        assert status == 1
        assert result["reason"].startswith("59 of 61 layers")
        assert check(capsys, layout, 61, 16)[1].startswith("not legal: 59 of 61 layers")
    else:
        assert status == 0
        assert [stage["layers"] for stage in result["stages"]] == sums
        assert [stage["share"] for stage in result["stages"]] == [s / 61 for s in sums]
        assert "61 layers on 16 stages x 2 virtual" in check(capsys, layout, 61, 16)[1]


def test_a_hand_made_layout_of_80_layers(capsys):
    layout = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"
    status, out = check(capsys, layout, 80, 8, "--json")
    result = json.loads(out)
    assert status == 0
    assert result["virtual_stages"] == 5
    assert [stage["layers"] for stage in result["stages"]] == [10, 10, 10, 11, 10, 10, 10, 9]


def test_counts_show_who_gets_what(capsys):
    status, out = check(capsys, "16,16,16,13", 61, 4)
    assert status == 0
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[1] for row in rows] == ["16", "16", "16", "13"]
    assert rows[3][2] == "21.3%"
    status, out = check(capsys, "16,16,16,14", 61, 4)
    assert (status, out[:30]) == (1, "not legal: 62 of 61 layers: th")


def test_mtp_is_no_decoder_layer(capsys):
    status, out = check(capsys, "Et*4|(tttt|)*14tmL", 61, 16, "--json")
    result = json.loads(out)
    assert status == 0
    assert result["mtp_layers"] == 1
    assert sum(stage["layers"] for stage in result["stages"]) == 61
    assert check(capsys, "Et*4|(tttt|)*14tmL", 62, 16)[0] == 1


def test_with_costs_the_layout_is_compared_with_the_best(capsys, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs_of([1.0] * 80, 0.1, 1.0, num_microbatches=64)))
    words = ["plan", "--costs", str(path), "--stages", "8"]
    uniform = [*words, "--check", "10x8"]
    assert main([*uniform, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["legal"] is True
    assert result["current"]["stages"][7]["forward_ms"] == pytest.approx(11.0)
    assert result["advice"] == "stay"
    assert main(uniform) == 0
    out = capsys.readouterr().out
    assert out.startswith("legal: ")
    assert "nothing to gain" in out
    # Five chunks a rank: legal with costs too, and its loads are those of the layers it names.
    by_hand = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"
    assert main([*words, "--check", by_hand, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert max(stage["forward_ms"] for stage in result["current"]["stages"]) == 11.0
    assert result["advice"] == "stay"
    assert main([*words, "--check", "10,10", "--json"]) == 1


@pytest.mark.parametrize("text", ["4", "2,x", "2;2", "", "-1,5", "2,,2", "99999999x99999999,1"])
def test_nonsense_is_a_layout_error(text):
    with pytest.raises(LayoutError):
        parse_layout(text, num_layers=4, num_stages=2)


def test_forms_of_counts():
    expected = [0, 1, 3, 5, 6]
    for text in ("1,2x2,1", "1, 2*2 ,1", "1,2\u00d72,1", "1,2,2,1", "Et|tt|tt|tL"):
        assert parse_layout(text, num_layers=6, num_stages=4).boundaries == expected


def test_other_virtual_stages_than_asked_for_are_not_legal(capsys):
    status, out = check(capsys, "Et*5|t*3L", 8, 2, "--virtual-stages", 2)
    assert status == 1
    assert out.startswith("not legal: 2 chunks on 2 pipeline stages: --virtual-stages 2 needs 4")
    assert check(capsys, "Ett|tt|tt|ttL", 8, 2, "--virtual-stages", 2)[0] == 0

"""What the benchmark of the balancers reports."""

import json

import pytest

from scripts import bench_balancers
from scripts.bench_balancers import BALANCERS, Chain, main, make_chains, measure


@pytest.mark.parametrize("size", [(8, 2), (32, 8)])
def test_ratios_say_who_finds_the_best_split(size):
    for chain in make_chains(*size):
        ratios = {b.name: measure(b, chain, 1)["ratio_to_optimum"] for b in BALANCERS}
        assert ratios["partition"] == 1.0
        assert min(ratios.values()) >= 1.0
        assert ratios["diffusion"] <= ratios["diffusion without relays"] <= ratios["uniform"]


def test_a_ratio_by_hand():
    # 10, 1, 1, 1 and an output of 2: best are [10] and [1, 1, 1, 2]; uniform has 11 on the first.
    chain = Chain("by hand", 2, [10.0, 1.0, 1.0, 1.0], last=2.0)
    uniform = next(b for b in BALANCERS if b.name == "uniform")
    cell = measure(uniform, chain, 1)
    assert (cell["layers"], cell["stages"], cell["case"]) == (4, 2, "by hand")
    assert (cell["slowest_ms"], cell["ratio_to_optimum"]) == (11.0, 1.1)
    assert cell["time_ms"] >= 0


def test_quick_prints_json_and_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(bench_balancers, "QUICK_SIZES", ((8, 2),))
    monkeypatch.setattr(bench_balancers, "write_results", lambda *args: pytest.fail("written"))
    monkeypatch.setattr("sys.argv", ["bench_balancers.py", "--quick", "--json"])
    assert main() == 0
    cells = json.loads(capsys.readouterr().out)
    assert len(cells) == 6 * len(BALANCERS)
    assert {cell["balancer"] for cell in cells} == {b.name for b in BALANCERS}


def test_the_whole_run_is_shown_and_written(monkeypatch, capsys):
    written = []
    monkeypatch.setattr(bench_balancers, "SIZES", ((8, 2), (8, 4)))
    monkeypatch.setattr(
        bench_balancers, "write_results", lambda *args: written.append(args) or "there"
    )
    monkeypatch.setattr("sys.argv", ["bench_balancers.py"])
    assert main() == 0
    ((name, kind, command, cells),) = written
    assert (name, kind, command) == ("balancers", "real", "make bench-balancers")
    assert len(cells) == 2 * 6 * len(BALANCERS)
    assert "slowest stage over the smallest possible" in capsys.readouterr().out

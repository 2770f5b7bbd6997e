import logging
from types import SimpleNamespace

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.reporter import Reporter
from megatron_dynmo.telemetry.dynamics_line import dynamics_line


def test_a_change_is_said_in_short():
    line = dynamics_line(8, "freezing", {"frozen": [1, 2, 3, 4], "embedding": True, "thawed": []})
    assert line == " dynmo iteration      8 | freezing: frozen 1..4, embedding yes, thawed none"


def test_repeated_numbers_are_counted_and_shares_are_rounded():
    what = {"buckets": [4, 4, 4, 16, 16], "density": [0.71234567, 1.0], "products": {"forward": 2}}
    assert dynamics_line(1, "sparse_attention", what) == (
        " dynmo iteration      1 | sparse attention: buckets 4 x3 16 x2, density 0.7123 1, "
        "products (forward 2)"
    )


def test_tables_are_left_out_and_long_lines_cut():
    assert dynamics_line(1, "moe", {"layers": [{"a": 1}]}).endswith("moe: ")
    line = dynamics_line(1, "pruning", {"layers": [k / 1000 for k in range(200)]})
    assert len(line) == 160 and line.endswith(" ...")


def test_changes_and_the_state_of_a_resumed_run_are_said_and_moe_is_not(caplog):
    run = SimpleNamespace(
        topology=SimpleNamespace(rank=0), is_emulated=False, is_writer_rank=True, writers=list
    )
    reporter = Reporter(run, DynMoConfig())
    logger = logging.getLogger("megatron_dynmo.speech")
    logger.addHandler(caplog.handler)
    reporter.dynamics(4, "freezing", {"frozen": [1, 2]})
    reporter.dynamics(4, "moe", {"layers": []})
    reporter.resumed(6, {"freezing/frozen_layers": 2.0, "freezing/rate/layer_3": 0.5})
    reporter.resumed(6, {})
    logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == [
        " dynmo iteration      4 | freezing: frozen 1 2",
        " dynmo iteration      6 | resumed with: freezing/frozen layers 2",
    ]

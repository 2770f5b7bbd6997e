import json
import logging

import numpy as np
import pytest

from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.profile_report import ProfileReport, StageProfile
from megatron_dynmo.telemetry import events
from megatron_dynmo.telemetry.events import EventLog, read_events


def report():
    costs = ModelCosts(
        layers=(LayerCost(1, 1.0, 2.0, 100, 10), LayerCost(2, 3.0, 4.0, 200, 20)),
        first_stage_extra=ExtraCost(0.5, 0.25),
        last_stage_extra=ExtraCost(6.0, 7.0, 300, 30),
        num_microbatches=8,
    )
    stages = (StageProfile(0, 0, 1.5, 2.5, 32.0, 8.0), StageProfile(1, 0, 9.0, 11.0, 40.0, 0.0))
    return ProfileReport(costs, stages, 0.11, 0.1, 50.0, 40.0, (1, 2))


def test_events_come_back_in_order_with_the_three_common_fields(tmp_path):
    times = iter([1.5, 2.5])
    log = EventLog(tmp_path / "new" / "events.jsonl", now_s=lambda: next(times))
    assert log.is_writing
    log.write(3, events.dynamics_event("freezing", frozen=[1, 2]))
    log.write(4, events.elastic_event("park", ranks=[2, 3], hosts=["n1"], answer="ok"))
    log.close()
    assert read_events(tmp_path / "new" / "events.jsonl") == [
        {
            "iteration": 3,
            "event": "dynamics",
            "time_s": 1.5,
            "kind": "freezing",
            "frozen": [1, 2],
        },
        {
            "iteration": 4,
            "event": "park",
            "time_s": 2.5,
            "ranks": [2, 3],
            "hosts": ["n1"],
            "answer": "ok",
        },
    ]


def test_each_event_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    for iteration in (1, 2, 3):
        log.write(iteration, events.dynamics_event("moe"))
        assert len(read_events(tmp_path / "events.jsonl")) == iteration


def test_rank_without_a_path_writes_nothing():
    log = EventLog(None)
    assert not log.is_writing
    log.write(1, events.dynamics_event("moe"))
    log.close()


def test_resumed_run_appends(tmp_path):
    path = tmp_path / "events.jsonl"
    for iteration in (1, 2):
        log = EventLog(path)
        log.write(iteration, events.dynamics_event("moe"))
        log.close()
    assert [event["iteration"] for event in read_events(path)] == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("kept", range(1, 70))
def test_line_cut_by_a_kill_loses_itself_only(tmp_path, caplog, kept):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, now_s=lambda: 1.0)
    log.write(1, events.dynamics_event("moe"))
    log.write(2, events.dynamics_event("é", nested=[{"a": 'quote" and {'}], value=-1.5))
    log.close()
    first, second, _ = path.read_bytes().split(b"\n")
    assert kept < len(second)
    path.write_bytes(first + b"\n" + second[:kept])
    with caplog.at_level(logging.WARNING):
        assert [event["iteration"] for event in read_events(path)] == [1]
        resumed = EventLog(path)
        resumed.write(3, events.dynamics_event("moe"))
        resumed.close()
        assert [event["iteration"] for event in read_events(path)] == [1, 3]
    assert "line 2 breaks off" in caplog.text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("not json", "line 2 is not JSON"),
        ('{"iteration": 1 "event": 2}', "line 2 is not JSON"),
        ("[1, 2]", "line 2 holds a list, must be an object"),
        ('{"iteration": 1}', "line 2 lacks event, time_s"),
    ],
)
def test_wrong_line_is_named(tmp_path, line, problem):
    path = tmp_path / "events.jsonl"
    path.write_text('{"iteration": 1, "event": "x", "time_s": 0}\n' + line + "\n")
    with pytest.raises(ConfigError, match=problem):
        read_events(path)


def test_missing_log_and_unwritable_folder_say_why(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_events(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*--dynmo-log-dir"):
        EventLog(tmp_path / "file" / "events.jsonl")


def test_iteration_event_keeps_every_bit():
    loss, norm = 0.1 + 0.2, 1 / 3
    event = events.iteration_event(
        iteration_ms=12.0, lm_loss=loss, grad_norm=norm, tokens_per_s=1e6
    )
    assert float.fromhex(event["lm_loss_hex"]) == loss
    assert float.fromhex(event["grad_norm_hex"]) == norm
    skipped = events.iteration_event(iteration_ms=12.0, lm_loss=None, grad_norm=None)
    assert skipped["lm_loss_hex"] is None and skipped["grad_norm_hex"] is None


def test_profile_event_has_the_fields_that_readers_rely_on():
    event = events.profile_event(report(), layout="Et|tL")
    assert event["layers"][1] == {
        "layer_number": 2,
        "forward_ms": 3.0,
        "backward_ms": 4.0,
        "memory_bytes": 200,
        "activation_bytes": 20,
    }
    assert {key: event["stages"][1][key] for key in ("pp_rank", "vp_stage", "busy_ms", "idle_ms")}
    assert event["stages"][1]["pp_rank"] == 1 and event["stages"][0]["idle_ms"] == 8.0
    assert event["first_stage_extra_ms"] == 0.75
    assert event["last_stage_extra_ms"] == 13.0
    assert (event["imbalance"], event["bubble_fraction"]) == (0.11, 0.1)
    json.dumps(event)


def test_profile_event_is_readable_as_costs():
    from megatron_dynmo.cost_file import costs_from_json

    event = events.profile_event(report())
    fields = ("layers", "first_stage_extra", "last_stage_extra", "num_microbatches")
    assert costs_from_json({name: event[name] for name in fields}) == report().costs


def test_decision_and_migration_use_the_words_of_the_format():
    decision = events.decision_event(
        action="stay",
        reason="gain 1.0 % is below 2 %",
        old_layout="Ett|tL",
        new_layout="Ett|tL",
        predicted_iteration_ms=9.0,
        gain_pct=1.0,
        migration_cost_ms=30.0,
    )
    assert (decision["from"], decision["to"]) == ("Ett|tL", "Ett|tL")
    migration = events.migration_event(
        old_layout="Ett|tL",
        new_layout="Et|ttL",
        num_bytes=8,
        duration_ms=5.0,
        layers_moved=(2,),
        overlapped_ms=2.0,
    )
    assert migration == {
        "event": "migration",
        "from": "Ett|tL",
        "to": "Et|ttL",
        "bytes": 8,
        "duration_ms": 5.0,
        "layers_moved": [2],
        "overlapped_ms": 2.0,
    }


def test_digest_and_numpy_numbers_can_be_written(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write(1, events.digest_event(layers={2: "b", 1: "a"}, embedding="e", output=None))
    log.write(2, events.dynamics_event("pruning", sparsity=np.float32(0.5)))
    digest, pruning = read_events(tmp_path / "events.jsonl")
    assert list(digest["layers"].items()) == [("1", "a"), ("2", "b")]
    assert pruning["sparsity"] == 0.5

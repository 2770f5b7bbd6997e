"""A job gives nodes back to a real SLURM, and another one starts on them."""

import pytest

from megatron_dynmo.telemetry.events import read_events
from tests.e2e.parity import EVENTS_FILE, drop_in, read_trace
from tests.ranks import run_ranks
from tests.slurm.cluster import local_cluster
from tests.slurm.runs import FREEZE_AT, collapsing

COMPARED = 40  # iterations; ranks leave after about half of them

pytestmark = pytest.mark.timeout(600)


def test_nodes_go_back_and_another_job_starts_on_them(tmp_path):
    script = tmp_path / "second.sh"
    script.write_text("#!/bin/sh\nsleep 3\n")
    log = tmp_path / "packed" / EVENTS_FILE
    with local_cluster(tmp_path) as cluster:
        first = cluster.train("packed", *collapsing(tmp_path, "packed"))
        cluster.wait_for(lambda: cluster.state(first)[0] == "RUNNING", 60)
        assert cluster.idle_nodes() == set()
        second = cluster.submit("second", 2, script)
        assert cluster.state(second)[0] == "PENDING"
        cluster.wait_for(lambda: cluster.state(second)[0] in ("RUNNING", "COMPLETED"), 240)
        # The first one trains on while the second one runs on what were its nodes.
        assert cluster.state(first) == ("RUNNING", "n[0,3]")
        assert cluster.state(second)[1] == "n[1-2]"
        cluster.wait_for(lambda: cluster.state(second)[0] == "COMPLETED", 60)
        cluster.wait_for(lambda: cluster.idle_nodes() == {"n1", "n2"}, 60)
        cluster.wait_for(lambda: max(read_trace(log.parent).losses) >= COMPARED, 120)
        # It ends by itself when it is told to, with the status of success.
        cluster.run("scancel", "--signal=TERM", first)
        assert cluster.wait_for_end(first, 60) == "COMPLETED", cluster.output()
    told = [e for e in read_events(log) if e["event"] in ("pack", "release")]
    assert [(e["event"], e["hosts"], e["answer"]) for e in told] == [
        ("pack", ["n1", "n2"], None),
        ("release", ["n1", "n2"], f"job {first} goes on with n0,n3"),
    ]
    assert FREEZE_AT < told[0]["iteration"] < COMPARED
    packed = read_trace(log.parent).losses
    assert sorted(packed) == list(range(1, len(packed) + 1))
    # The run that never packed has the same losses, bit for bit.
    run_ranks(
        drop_in, 4, *collapsing(tmp_path, "still"), "--dynmo-pack", "off",
        "--exit-interval", str(COMPARED), timeout_s=240,
    )  # fmt: skip
    still = read_trace(tmp_path / "still").losses
    assert len(still) == COMPARED and still.items() <= packed.items()

"""A job whose nodes are needed again saves, ends, and submits itself for all of them."""

import pytest

from megatron_dynmo.telemetry.events import read_events
from tests.e2e.parity import EVENTS_FILE, drop_in, read_trace
from tests.ranks import run_ranks
from tests.slurm.cluster import local_cluster
from tests.slurm.runs import growing, restarting

pytestmark = [pytest.mark.timeout(600), pytest.mark.matrix]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_run_that_gave_nodes_back_grows_again(launcher, tmp_path):
    with local_cluster(tmp_path) as cluster:
        first = cluster.train("grown", *restarting(tmp_path, "grown"), launcher=launcher)
        assert cluster.wait_for_end(first, 240) == "COMPLETED", cluster.output()
        second = cluster.run("squeue", "-h", "-o", "%A")
        cluster.wait_for(lambda: cluster.state(second)[0] == "RUNNING", 60)
        assert second != first and cluster.state(second)[1] == "n[0-3]"
        assert cluster.wait_for_end(second, 240) == "COMPLETED", cluster.output()
    events = read_events(tmp_path / "grown" / EVENTS_FILE)
    told = [(e["iteration"], e["event"], e["ranks"]) for e in events
            if e["event"] in ("pack", "restart", "rejoin")]  # fmt: skip
    assert told == [(2, "pack", [1, 2]), (6, "restart", [1, 2])]
    run_ranks(drop_in, 4, *growing(tmp_path, "still"), "--dynmo-force-pack", "13:2", timeout_s=240)
    grown, still = read_trace(tmp_path / "grown"), read_trace(tmp_path / "still")
    assert sorted(grown.losses) == list(range(1, 13))
    assert grown.losses == still.losses and grown.digests == still.digests

"""A real SLURM on this machine: a job gives nodes back, and another one starts on them."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dynmo.telemetry.events import read_events
from tests.e2e.parity import EVENTS_FILE, drop_in, read_trace
from tests.e2e.training import TINY_GPT
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"
COLLAPSE_AT = 8
ITERATIONS = 150

# From iteration 8 on, all but the last two layers cost next to nothing, as when they are frozen.
EMULATION = {
    "num_layers": 8,
    "every_layer": {
        "forward_ms": 10.0,
        "backward_ms": 20.0,
        "memory_bytes": 1000000,
        "scale": {"kind": "step", "from": {"1": 1.0, str(COLLAPSE_AT): 0.001}},
    },
    "layers": [{"layer_number": n, "scale": 1.0} for n in (7, 8)],
    "migration": {"bandwidth_gb_s": 25, "rebuild_ms": 1},
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def cluster(tmp_path):
    """Four virtual nodes; gives a function that runs a SLURM command."""
    for program in ("slurmctld", "munged"):
        path = os.environ["PATH"] + ":/usr/sbin"
        assert shutil.which(program, path=path), "install slurm-wlm and munge"
    local = SCRIPTS / "local_cluster.sh"
    subprocess.run([local, "start", tmp_path / "slurm"], check=True, timeout=120)
    environment = {
        **os.environ, "SLURM_CONF": str(tmp_path / "slurm/slurm.conf"), "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip

    def run(*words):
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=True, timeout=60,
        )  # fmt: skip
        return done.stdout

    try:
        yield run
    finally:
        subprocess.run([local, "stop", tmp_path / "slurm"], check=False, timeout=60)


def state_of(run, job):
    lines = run("scontrol", "show", "job", job, "--oneliner")
    fields = dict(word.split("=", 1) for word in lines.split() if "=" in word)
    return fields["JobState"], fields.get("NodeList", "")


def words_of(tmp_path, name):
    """The 4-stage run; its load is virtual, so that the decision is always the same."""
    load = tmp_path / "load.json"
    load.write_text(json.dumps(EMULATION))
    return [
        *TINY_GPT, "--num-layers", "8", "--pipeline-model-parallel-size", "4",
        "--train-iters", str(ITERATIONS), "--lr-decay-iters", str(ITERATIONS),
        "--dynmo-emulate", str(load), "--dynmo-log-dir", str(tmp_path / name),
    ]  # fmt: skip


def training(run, tmp_path, name):
    """Submit it with one rank a node."""
    return run(
        "sbatch", "--parsable", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=0",
        "--exclusive", "--no-kill", f"--output={tmp_path / name}.out",
        SCRIPTS / "multi_node_srun.sbatch", *words_of(tmp_path, name),
    ).strip()  # fmt: skip


def wait_for(what, timeout_s, log):
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, log.read_text()[-8000:] if log.exists() else "no log"
        time.sleep(0.5)
    return found


def test_nodes_go_back_and_another_job_starts_on_them(cluster, tmp_path):
    first = training(cluster, tmp_path, "packed")
    log = tmp_path / "packed.out"
    script = tmp_path / "second.sh"
    script.write_text("#!/bin/sh\ndate +%s.%N; sleep 5\n")
    wait_for(lambda: state_of(cluster, first)[0] == "RUNNING", 60, log)
    second = cluster(
        "sbatch", "--parsable", "--nodes=2", f"--output={tmp_path / 'second.out'}", script
    ).strip()
    assert state_of(cluster, second)[0] == "PENDING"
    wait_for(lambda: state_of(cluster, second)[0] in ("RUNNING", "COMPLETED"), 300, log)
    # The first one trains on while the second one runs on what were its nodes.
    assert state_of(cluster, first)[0] == "RUNNING"
    assert state_of(cluster, second)[1] == "n[1-2]"
    assert state_of(cluster, first)[1] == "n[0,3]"
    wait_for(lambda: state_of(cluster, first)[0] not in ("RUNNING", "COMPLETING"), 300, log)
    assert state_of(cluster, first)[0] == "COMPLETED", log.read_text()[-8000:]
    trace = read_trace(tmp_path / "packed")
    assert sorted(trace.losses) == list(range(1, ITERATIONS + 1))
    told = [e for e in read_events(tmp_path / "packed" / EVENTS_FILE)
            if e["event"] in ("pack", "release")]  # fmt: skip
    assert [(e["event"], e["hosts"]) for e in told] == [
        ("pack", ["n1", "n2"]),
        ("release", ["n1", "n2"]),
    ]
    assert "goes on with n0,n3" in told[1]["answer"]
    # The run that never packed has the same losses, bit for bit.
    run_ranks(drop_in, 4, *words_of(tmp_path, "still"), timeout_s=240)
    assert read_trace(tmp_path / "still").losses == trace.losses

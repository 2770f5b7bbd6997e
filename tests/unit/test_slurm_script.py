"""The multi-node batch script, with programs on PATH that only note how they were called."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "multi_node.sbatch"
RESTART = ("--dynmo-release", "restart")
PROGRAMS = {
    "scontrol": 'printf "n0\\nn1\\n"',
    # As srun does on the first node, without its own options.
    "srun": """
        while [ "$1" != bash ]; do options="${options-} $1"; shift; done
        echo "srun$options" >> calls
        exec "$@"
        """,
    "sbatch": """
        echo "sbatch $* from=${MASTER_ADDR-}:${MASTER_PORT-}" >> calls
        case " $* " in *" --test-only "*) exit "${TEST_STATUS:-0}" ;; esac
        exit "${SBATCH_STATUS:-0}"
        """,
    # The run: with a restart file it asks for four nodes.
    "python": """
        echo "python $* at=$MASTER_ADDR:$MASTER_PORT rank=${RANK-}" >> calls
        if [ -n "$ASKS" ] && [ -n "$DYNMO_RESTART_FILE" ]; then echo 4 > "$DYNMO_RESTART_FILE"; fi
        exit "${RUN_STATUS:-0}"
        """,
}


@pytest.fixture
def job(tmp_path):
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)

    def run(*words, **environment):
        """Returns the script's status, how programs were called, and what it left behind."""
        (tmp_path / "calls").unlink(missing_ok=True)
        mine = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "ASKS": "",
            "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0",
            "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", SCRIPT, *words], cwd=tmp_path, env=mine | environment, check=False, timeout=60
        )
        calls = tmp_path / "calls"
        left = [path.name for path in tmp_path.glob("dynmo-77*")]
        return done.returncode, calls.read_text().splitlines() if calls.exists() else [], left

    return run


def test_each_launcher_starts_the_run(job):
    status, (srun, run), left = job("--x", "a b")
    assert status == 0 and left == []
    assert all(word in srun.split() for word in ("--no-kill", "--kill-on-bad-exit=0", "--wait=0"))
    assert run.startswith("python -m megatron_dynmo.pretrain_gpt --exit-signal-handler")
    assert run.endswith("--x a b at=n0:20077 rank=0")
    status, (_, run), _ = job("--x", LAUNCHER="torchrun", RANKS_PER_NODE="3")
    assert run.startswith(
        "python -m torch.distributed.run --nnodes 2 --node-rank 0 --nproc-per-node 3 "
        "--master-addr n0 --master-port 20077 -m megatron_dynmo.pretrain_gpt"
    )
    assert job(LAUNCHER="torchrun", SLURM_NTASKS_PER_NODE="8")[:2] == (2, [])
    assert job(LAUNCHER="mpirun")[:2] == (2, [])


def test_a_run_that_asks_for_it_is_submitted_again_and_inherits_no_address(job):
    status, calls, left = job(*RESTART, ASKS="1", SLURM_NTASKS_PER_NODE="8")
    assert status == 0 and left == []
    words = f"{SCRIPT} --dynmo-release restart from=:"
    assert [call for call in calls if call.startswith("sbatch")] == [
        f"sbatch --nodes 2 --ntasks-per-node 8 --test-only {words}",
        f"sbatch --nodes 4 --ntasks-per-node 8 {words}",
    ]
    assert not [call for call in job(*RESTART)[1][1:] if call.startswith("sbatch")]


def test_a_submission_that_fails_is_the_jobs_status(job):
    assert job(*RESTART, ASKS="1", SBATCH_STATUS="3")[0] == 1
    # Known beforehand: the run does not get the file by which it would ask.
    status, calls, _ = job(*RESTART, ASKS="1", TEST_STATUS="3")
    assert status == 0 and len([call for call in calls if call.startswith("sbatch")]) == 1


def test_notes_of_the_job_before_it_was_requeued_do_not_count(job, tmp_path):
    (tmp_path / "dynmo-77.done").write_text("0\n")
    (tmp_path / "dynmo-77.restart").write_text("4\n")
    # Killed before it could tell how it ended: what srun says counts.
    status, calls, left = job(SLURM_PROCID="1", RUN_STATUS="9")
    assert status == 9 and left == [] and not [call for call in calls if "sbatch" in call]
    assert job(RUN_STATUS="5")[0] == 5

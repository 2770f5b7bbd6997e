"""Ranks that die and job managers that fail while a run is packed: on it goes, or a clear stop."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dynmo.telemetry.events import read_events
from tests.e2e.parity import EVENTS_FILE, drop_in, read_trace
from tests.e2e.training import TINY_GPT
from tests.ranks import RanksFailed, run_ranks

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable

pytestmark = [pytest.mark.timeout(600), pytest.mark.matrix]


def words(packs: str, folder: Path, *flags: str, iterations: int = 8) -> list[str]:
    return [
        *TINY_GPT, "--num-layers", "6", "--pipeline-model-parallel-size", "3",
        "--train-iters", str(iterations), "--lr-decay-iters", str(iterations),
        "--dynmo-log-dir", str(folder), "--dynmo-force-pack", packs, *flags,
    ]  # fmt: skip


def told(folder: Path, *kinds: str):
    log = folder / EVENTS_FILE
    return [e for e in read_events(log) if e["event"] in kinds] if log.exists() else []


def dying(rank, world_size, victim, *argv):
    """A rank dies while the groups are made anew: the one that leaves, or one that stays.

    The others wait three seconds for it instead of ten minutes.
    """
    from megatron_dynmo.adapters.world import World

    close = World._close_together

    def soon(self):
        self._args.distributed_timeout_minutes = 0.05
        close(self)

    World._close_together = soon
    if rank == victim:
        World.be_alone = World._form = lambda *args: os._exit(9)
    drop_in(rank, world_size, *argv)


@pytest.mark.parametrize("victim", [1, 2], ids=["leaves", "stays"])
def test_a_rank_that_dies_while_ranks_leave_stops_the_run(victim, tmp_path):
    """No iteration is trained without it, and all others say what to do."""
    with pytest.raises(RanksFailed) as failure:
        run_ranks(dying, 3, victim, *words("2:2", tmp_path), timeout_s=120)
    assert "exit code 9" in failure.value.errors[victim]
    for rank in {0, 1, 2} - {victim}:
        said = failure.value.errors[rank]
        assert "MigrationError: the process groups could not be made anew" in said
        assert "restart from the last checkpoint" in said
    assert sorted(read_trace(tmp_path).losses) == [1, 2]


def launched(folder: Path, port: int, argv: list[str]) -> list[subprocess.Popen]:
    """Three ranks without a launcher that would end all of them when one ends."""
    common = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3",
    }  # fmt: skip
    ranks = []
    for rank in range(3):
        with (folder / f"rank{rank}.log").open("w") as output:
            ranks.append(subprocess.Popen(
                [PYTHON, "-m", "megatron_dynmo.pretrain_gpt", *argv], stdout=output,
                stderr=subprocess.STDOUT, cwd=folder,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            ))  # fmt: skip
    return ranks


def test_a_parked_rank_that_is_killed_is_missed_and_training_goes_on(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Long enough for the rank to be killed between the two.
    argv = words("2:2;100:3", tmp_path, iterations=110)
    ranks = launched(tmp_path, port, argv)
    try:
        deadline = time.monotonic() + 240
        while not told(tmp_path, "park"):
            assert time.monotonic() < deadline, (tmp_path / "rank0.log").read_text()[-4000:]
            time.sleep(0.1)
        ranks[1].send_signal(signal.SIGKILL)
        assert [ranks[0].wait(120), ranks[2].wait(30), ranks[1].wait(1)] == [0, 0, -9]
    finally:
        for rank in ranks:
            rank.kill()
    assert sorted(read_trace(tmp_path).losses) == list(range(1, 111))
    assert told(tmp_path, "rejoin") == []
    assert "parked ranks [1] do not answer: training goes on with 2 stages" in "".join(
        (tmp_path / f"rank{rank}.log").read_text() for rank in (0, 2)
    )


REFUSES = "import sys; sys.exit('not today')"
HANGS = "import time; time.sleep(20)"


@pytest.mark.parametrize(
    ("manager", "said", "kinds"),
    [
        (f'{PYTHON} -c "{REFUSES}"', "the nodes stay with the job", ["pack", "release"]),
        (f'{PYTHON} -c "{HANGS}"', "has not answered", ["pack"]),
        # Where nobody would take the nodes, ranks stay to come back.
        ("no-such-program", "packed away are parked instead", ["pack", "park"]),
    ],
    ids=["refuses", "hangs", "is missing"],
)
def test_a_job_manager_that_fails_stops_nothing(manager, said, kinds, tmp_path):
    flags = ("--dynmo-release", "exit", "--dynmo-job-manager", f"command:{manager}")
    run_ranks(drop_in, 3, *words("2:2", tmp_path, *flags), timeout_s=120, log_dir=tmp_path)
    assert sorted(read_trace(tmp_path).losses) == list(range(1, 9))
    events = told(tmp_path, "pack", "park", "release")
    assert [event["event"] for event in events] == kinds
    for event in events:
        assert event["event"] != "release" or "status 1: not today" in event["answer"]
    assert said in "".join((tmp_path / f"rank{rank}.log").read_text() for rank in range(3))

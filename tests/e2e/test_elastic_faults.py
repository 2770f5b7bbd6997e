"""Ranks that die and job managers that fail while a run is packed: on it goes, or a clear stop."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from megatron_dynmo.telemetry.events import read_events
from tests.e2e.parity import EVENTS_FILE, drop_in, read_trace
from tests.e2e.training import TINY_GPT
from tests.ranks import RanksFailed, run_ranks

PYTHON = sys.executable

pytestmark = pytest.mark.matrix


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


def killed_when_parked(rank, world_size, folder, *argv):
    """Rank 1 trains in a process of its own, which is killed as soon as it is parked."""
    if rank != 1:
        drop_in(rank, world_size, *argv)
        return
    child = os.fork()
    if not child:
        drop_in(rank, world_size, *argv)
        os._exit(0)
    while not told(Path(folder), "park"):
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_parked_rank_that_is_killed_is_missed_and_training_goes_on(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Long enough for the rank to be killed between the two.
    run_ranks(
        killed_when_parked, 3, str(tmp_path), *words("2:2;80:3", tmp_path, iterations=85),
        timeout_s=240, log_dir=tmp_path, init_process_group=False,
        env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    )  # fmt: skip
    assert sorted(read_trace(tmp_path).losses) == list(range(1, 86))
    assert told(tmp_path, "rejoin") == []
    output = "".join((tmp_path / f"rank{rank}.log").read_text() for rank in (0, 2))
    assert "parked ranks [1] do not answer: training goes on with 2 stages" in output


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

"""The helper that every distributed test relies on."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import RanksFailed, run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: float) -> np.ndarray:
    import torch

    value = torch.tensor([rank + offset])
    torch.distributed.all_reduce(value)
    return value.numpy()


def _threads(rank: int, world_size: int) -> tuple[int, bool]:
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    return int(status.split("Threads:")[1].split()[0]), "megatron.training.training" in sys.modules


def _one_raises(rank: int, world_size: int) -> None:
    print(f"hello from {rank}")
    if rank == 1:
        raise ValueError("the reason")
    import torch

    torch.distributed.barrier()


def _one_dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)


def _one_sleeps(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def _starts_a_child(rank: int, world_size: int) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def _one_leaves(rank: int, world_size: int) -> str:
    if rank == 1:
        sys.exit(0)
    return "stayed"


def _environment(rank: int, world_size: int) -> list[str]:
    return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "COLOUR")]


def test_results_come_back_by_rank() -> None:
    first, second = run_ranks(_sum_of_ranks, 2, 0.5)
    assert first == second == np.array([2.0], dtype=np.float32)


def test_the_server_has_imported_megatron_and_runs_one_thread() -> None:
    assert run_ranks(_threads, 1, init_process_group=False) == [(1, True)]
    assert threading.active_count() < 10


def test_a_rank_that_raises_comes_back_with_rank_traceback_and_output() -> None:
    with pytest.raises(RanksFailed, match="the reason") as caught:
        run_ranks(_one_raises, 2)
    assert caught.value.rank == 1
    assert "_one_raises" in caught.value.errors[1]
    assert "hello from 0" in str(caught.value)


def test_a_rank_that_dies_says_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match="exit code 7"):
        run_ranks(_one_dies, 2)


def test_a_rank_that_hangs_is_ended_and_shows_where_it_stood() -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[1\] had not finished after 3 s") as caught:
        run_ranks(_one_sleeps, 2, timeout_s=3)
    assert "_one_sleeps" in str(caught.value)


def test_what_a_rank_started_is_ended_with_it() -> None:
    (child,) = run_ranks(_starts_a_child, 1, init_process_group=False)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and not _is_zombie(child):
        assert time.monotonic() < deadline, f"process {child} is still there"
        time.sleep(0.01)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_rank_may_leave_early() -> None:
    assert run_ranks(_one_leaves, 2) == ["stayed", None]


def test_environment_and_logs(tmp_path) -> None:
    got = run_ranks(_environment, 2, env={"COLOUR": "green"}, log_dir=tmp_path)
    assert got == [["0", "0", "2", "green"], ["1", "1", "2", "green"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.log", "rank1.log"]

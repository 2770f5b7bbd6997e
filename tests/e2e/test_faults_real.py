"""Faults in moves of real Megatron training: on as if nothing had been tried, or a clear stop."""

import functools
import os
import threading

import pytest

from tests.e2e.moving import train_ours
from tests.e2e.parity import read_trace
from tests.fault_table import (
    BITFLIP,
    CONTINUED,
    REAL,
    REAL_CELLS,
    REAL_DP,
    STOPPED,
    Cell,
    wanted,
)
from tests.ranks import RanksFailed, run_ranks

ITERATIONS = 6
FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--bf16", "--use-distributed-optimizer"),
    *("--overlap-grad-reduce", "--overlap-param-gather", "--clip-grad", "1.0"),
    *("--train-iters", str(ITERATIONS), "--distributed-timeout-minutes", "2"),
    *("--dynmo-digest-interval", "1"),
)
WORLD = {REAL: 2, REAL_DP: 4}
OLD = "Ett|ttL"
RIGHT, LEFT = "Et|t*3L", "Et*3|tL"  # rank 0 sends a layer, or rank 1 does


def _target(cell: Cell) -> str:
    """The layout for which the struck rank sends or receives as the fault needs it."""
    stage = cell.rank * 2 // WORLD[cell.run]
    receives = cell.fault.endswith(("slots", "accept")) or cell.fault == BITFLIP
    receives |= cell.phase == "landing"
    return RIGHT if (stage == 1) == receives else LEFT


def _inject(cell: Cell, rank: int) -> None:
    """Break the first move on one rank."""
    from megatron.core.distributed import DistributedDataParallel

    from megatron_dynmo.adapters.stage import MegatronStage
    from megatron_dynmo.migrator import Migrator

    if rank != cell.rank:
        return
    now = {"phase": "", "armed": True}
    run = Migrator._run

    def noting_phase(self, plan, phase, timings, body):
        now["phase"] = phase
        try:
            return run(self, plan, phase, timings, body)
        finally:
            now["phase"] = ""

    Migrator._run = noting_phase
    kind, _, method = cell.fault.partition(" in ")
    method = method or {BITFLIP: "accept"}.get(kind, "parcel")
    # In `settle` it strikes when the hooks are off and the gather is done.
    owner, name = (
        (DistributedDataParallel, "start_param_sync")
        if method == "settle"
        else (MegatronStage, method)
    )
    original = getattr(owner, name)

    def is_struck(args) -> bool:
        if cell.phase == "landing":  # in the thread that receives what follows
            return threading.current_thread() is not threading.main_thread()
        return now["phase"] == cell.phase

    def failing(*args, **kwargs):
        if not now["armed"] or not is_struck(args):
            return original(*args, **kwargs)
        now["armed"] = False
        if kind == "killed process":
            os._exit(9)
        if kind == BITFLIP:
            _flip_a_bit(args[2])
            return original(*args, **kwargs)
        if method in ("settle", "commit", "restore"):
            original(*args, **kwargs)  # the worst moment: all is done but the answer
        raise MemoryError(f"injected into {method}")

    setattr(owner, name, failing)


def _flip_a_bit(parcel) -> None:
    import torch

    name = next(name for name in parcel.tensors if name.endswith("/exp_avg"))
    parcel.tensors[name].view(-1).view(torch.int32)[5] ^= 1


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """For each kind of run, the trace of one that never moves."""
    return functools.cache(
        lambda run: _train(run, None, f"{ITERATIONS + 1}:{RIGHT}", tmp_path_factory.mktemp("still"))
    )


def _train(run: str, fault, moves: str, folder, *flags: str):
    run_ranks(
        train_ours,
        WORLD[run],
        None,
        fault,
        *FLAGS,
        *flags,
        *("--dynmo-force-layout", moves, "--dynmo-log-dir", str(folder)),
        log_dir=folder / "ranks",
        timeout_s=200,
    )
    return read_trace(folder)


def _goes_on(cell: Cell, still, folder) -> str:
    """The first attempt is refused, the second one succeeds, and no number differs."""
    target = _target(cell)
    tried = _train(cell.run, functools.partial(_inject, cell), f"2:{target};4:{target}", folder)
    said = (folder / "ranks" / f"rank{WORLD[cell.run] - 1}.log").read_text()
    assert f"failed in {cell.phase}: rank {cell.rank}: MemoryError: injected into" in said
    assert said.count(f"Every rank still holds {OLD}; training goes on there") == 1
    assert [(m["iteration"], m["from"], m["to"]) for m in tried.migrations] == [(4, OLD, target)]
    assert len(still.digests) == ITERATIONS
    assert (still.losses, still.grad_norms) == (tried.losses, tried.grad_norms)
    assert still.digests == tried.digests
    return CONTINUED


def _stops(cell: Cell, folder) -> str:
    """Every living rank ends with what it holds, and nobody waits."""
    flags = ("--dynmo-overlap-moves",) if cell.phase == "landing" else ()
    with pytest.raises(RanksFailed) as failed:
        _train(cell.run, functools.partial(_inject, cell), f"2:{_target(cell)}", folder, *flags)
    errors = failed.value.errors
    assert sorted(errors) == list(range(WORLD[cell.run])), str(failed.value)
    for rank, text in errors.items():
        if cell.fault == "killed process" and rank == cell.rank:
            assert "died with exit code 9" in text
            continue
        said = text.strip().splitlines()[-1]
        assert "MigrationError: moving " in text or "FailedAlone: moving " in text, text
        assert "olding layers [" in text or "This rank holds layers [" in text, said
        assert "restart from the last checkpoint" in text, said
    if cell.fault == BITFLIP:
        assert "failed in verify: " in text and "state changed on its way: layer " in text
    return STOPPED


@pytest.mark.matrix
@pytest.mark.parametrize("cell", REAL_CELLS, ids=lambda cell: cell.name)
def test_the_table(cell, still, tmp_path, fault_results):
    if wanted(cell) == CONTINUED:
        outcome = _goes_on(cell, still(cell.run), tmp_path)
    else:
        outcome = _stops(cell, tmp_path)
    fault_results.append({**cell._asdict(), "outcome": outcome})

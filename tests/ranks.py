"""Run a function in several ranks on this machine and get their results, or one clear failure.

Ranks are forked from one server process that has imported Megatron already, so the import is paid
once for a whole test session. That is safe because the server runs a single thread: it imports and
forks, nothing else (`tests/distributed/test_ranks.py` checks that).
"""

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PRELOAD = (
    "megatron.training.training",
    "megatron.training.argument_utils",
    "megatron.core.datasets.gpt_dataset",
    # Half of a small run would go into these: they bring transformers along.
    "megatron.core.tokenizers.text",
    "transformers.models.auto.tokenization_auto",
    "torch._dynamo.eval_frame",
    "tests.frozen",
)
# How long the peers of a failed rank may take to notice before they are ended.
_GRACE_S = 5.0
_LOG_TAIL_LINES = 60
_PR_SET_PDEATHSIG = 1


class RanksFailed(RuntimeError):
    """A rank raised, died or did not finish; the text holds tracebacks, stacks and output.

    Attributes:
        rank: The rank that failed first.
        errors: rank -> traceback text, of every rank that raised or died.
    """

    def __init__(self, message: str, rank: int, errors: Mapping[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.errors = dict(errors)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    init_process_group: bool = True,
    env: Mapping[str, str] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `world_size` processes and return their results.

    Args:
        fn: A module-level function. Its result is a plain value or numpy arrays (not a tensor).
        world_size: Number of ranks.
        args: Passed on; picklable.
        timeout_s: All ranks are ended after that many seconds, which is a failure. It does not
            include the import of Megatron, paid once by the server.
        init_process_group: Whether each rank starts with a gloo group of all ranks, which met
            through a file (no port is taken).
        env: Environment variables of the ranks, beside RANK, LOCAL_RANK and WORLD_SIZE.
        log_dir: Where each rank's output goes, as `rank{N}.log`; a temporary folder by default.

    Returns:
        The results by rank. A rank that calls `sys.exit(0)` gives None.

    Raises:
        RanksFailed: A rank raised, died, or had not finished in time.
    """
    context = _server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        logs = Path(log_dir or scratch)
        logs.mkdir(parents=True, exist_ok=True)
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            settings = _Settings(rank, world_size, scratch, str(logs), timeout_s)
            process = context.Process(
                target=_rank_main,
                args=(settings, theirs, dict(env or {}), init_process_group, fn, args),
                # A daemon may start no process, as Megatron's checkpoint writer does.
                daemon=False,
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(rank, process, ours))
        try:
            return _collect(ranks, logs, Path(scratch), timeout_s)
        finally:
            _end(ranks)


def _server() -> Any:
    """Start the server that ranks are forked from, once, with one thread for each library."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
        # The first answer comes when the imports are done, so that no timeout counts them.
        process = context.Process(target=_ready, daemon=True)
        process.start()
        process.join()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


def _ready() -> None:
    """Do nothing: being called shows that the server answers."""


class _Settings:
    """Where one rank stands and where it writes."""

    def __init__(self, rank: int, world_size: int, scratch: str, logs: str, timeout_s: float):
        self.rank = rank
        self.world_size = world_size
        self.rendezvous = f"{scratch}/rendezvous"
        self.log = f"{logs}/rank{rank}.log"
        self.stacks = f"{scratch}/rank{rank}.stacks"
        self.timeout_s = timeout_s


class _Rank:
    """One process as its parent sees it."""

    def __init__(self, rank: int, process: Any, connection: Any) -> None:
        self.rank = rank
        self.process = process
        self.connection = connection
        self.done = False
        self.result: Any = None


def _rank_main(
    settings: _Settings,
    connection: Any,
    env: dict[str, str],
    init_process_group: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Be one rank: redirect output, meet the others, call `fn`, report, wait for the others."""
    # A group of its own, so that what a rank starts is ended with it. No rank outlives its tests.
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # Stays open for the life of the process: faulthandler writes to its descriptor.
    stacks = open(settings.stacks, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(
        RANK=str(settings.rank),
        LOCAL_RANK=str(settings.rank),
        WORLD_SIZE=str(settings.world_size),
        OMP_NUM_THREADS="1",
    )
    # Every rank is on this machine; the host name may resolve to an interface that is down.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(env)
    try:
        if init_process_group:
            _meet(settings)
        outcome = ("result", fn(settings.rank, settings.world_size, *args))
    except SystemExit as stop:
        if stop.code in (None, 0):
            outcome = ("result", None)
        else:
            outcome = ("error", f"SystemExit: {stop.code}\n" + traceback.format_exc())
    except BaseException:
        outcome = ("error", traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(outcome)
    # Peers may still read from this rank: it leaves when the parent says that all have finished.
    connection.poll(settings.timeout_s if outcome[0] == "result" else 0)
    # No destructor runs: gloo's threads could wait there for a peer that has left.
    os._exit(0)


def _meet(settings: _Settings) -> None:
    """Join the gloo group of all ranks.

    Collective: every rank, once, before anything else.
    """
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{settings.rendezvous}",
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=datetime.timedelta(seconds=settings.timeout_s),
    )


def _collect(ranks: list[_Rank], logs: Path, scratch: Path, timeout_s: float) -> list[Any]:
    """Wait for every rank's report; raise RanksFailed as soon as the run cannot succeed."""
    deadline = time.monotonic() + timeout_s
    errors: dict[int, str] = {}
    while waiting := [rank for rank in ranks if not rank.done]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        connections = {rank.connection: rank for rank in waiting}
        for ready in multiprocessing.connection.wait(list(connections), timeout=left_s):
            rank = connections[ready]
            rank.done = True
            try:
                kind, value = ready.recv()
            except EOFError:
                rank.process.join(1)
                kind, value = "error", f"died with exit code {rank.process.exitcode}, no report"
            if kind == "result":
                rank.result = value
            else:
                if not errors:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                errors[rank.rank] = value
    if not errors and not waiting:
        return [rank.result for rank in ranks]
    raise _failure(waiting, errors, logs, scratch, timeout_s)


def _failure(
    waiting: list[_Rank], errors: dict[int, str], logs: Path, scratch: Path, timeout_s: float
) -> RanksFailed:
    """Say who failed first, where the others stood and what each one had written."""
    for rank in waiting:
        if rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    if waiting:
        time.sleep(0.5)
    first = next(iter(errors), None)
    if first is None:
        first = waiting[0].rank
        parts = [f"ranks {[rank.rank for rank in waiting]} had not finished after {timeout_s:g} s"]
    else:
        parts = [f"rank {first} failed first"]
    parts += [f"--- rank {rank} ---\n{text}" for rank, text in errors.items()]
    for rank in waiting:
        stacks = (scratch / f"rank{rank.rank}.stacks").read_text(errors="replace")
        parts.append(f"--- rank {rank.rank} stood here ---\n{stacks}")
    for log in sorted(logs.glob("rank*.log")):
        tail = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        parts.append(f"--- output of {log.stem} (last lines) ---\n" + "\n".join(tail))
    return RanksFailed("\n".join(parts), first, errors)


def _end(ranks: list[_Rank]) -> None:
    """Let every rank go, and end those that do not."""
    for rank in ranks:
        rank.connection.close()
    for rank in ranks:
        rank.process.join(0.0 if not rank.done else 2.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()

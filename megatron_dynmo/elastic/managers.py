"""Job managers: who takes nodes back that a run no longer needs, and starts it anew with more.

A manager may take its time, fail or hang; it is asked beside the training and its answer is only
told. Programs are run by argument vector, never through a shell.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_dynmo.errors import DynMoError
from megatron_dynmo.flags.elastic import parse_manager

__all__ = ["CommandManager", "JobManager", "ManagerError", "NodeChange", "SlurmManager"]

_TIMEOUT_S = 60.0
_SHRUNK_WITHIN_S = 20.0  # until SLURM shows the new list of nodes
# Names the file into which goes with how many nodes the batch script is to submit itself again.
_RESTART_NOTE = "DYNMO_RESTART_FILE"


class ManagerError(DynMoError):
    """A job manager refused, failed, did not answer or is not there."""


@dataclass(frozen=True)
class NodeChange:
    """What is given back.

    Attributes:
        iteration: after which the ranks left.
        ranks: that have exited, by their number at the start.
        freed_nodes: names of the nodes on which no rank is left.
        kept_nodes: names of the nodes that go on, in pipeline order.
    """

    iteration: int
    ranks: tuple[int, ...]
    freed_nodes: tuple[str, ...]
    kept_nodes: tuple[str, ...]


class JobManager(Protocol):
    """What a manager can do."""

    def check(self, restarts: bool = False) -> None:
        """Before ranks exit: would the nodes be taken?

        Args:
            restarts: whether the run is to be started anew when they are needed again.

        Raises:
            ManagerError: No, and why.
        """

    def release(self, change: NodeChange) -> str:
        """Give nodes back; may block for a minute.

        Returns:
            The answer, in one line.

        Raises:
            ManagerError: It did not work, and why.
        """

    def restart(self, iteration: int, num_nodes: int) -> str:
        """Promise to start the run anew once it has saved and ended; may block for a minute.

        Args:
            iteration: last one completed.
            num_nodes: that it needs then.

        Returns:
            The answer, in one line.

        Raises:
            ManagerError: It will not, and why.
        """


def make_manager(text: str) -> JobManager | None:
    """The manager that `--dynmo-job-manager` names; None for `none`."""
    kind, words = parse_manager(text)
    if kind == "slurm":
        return SlurmManager()
    return CommandManager(words) if kind == "command" else None


class CommandManager:
    """Any program: gets the change as a JSON document on standard input, status 0 is a yes.

    Args:
        words: the program and its arguments.
        timeout_s: after which it is killed.
    """

    def __init__(self, words: Sequence[str], timeout_s: float = _TIMEOUT_S) -> None:
        self._words = tuple(words)
        self._timeout_s = timeout_s

    def check(self, restarts: bool = False) -> None:
        """See `JobManager.check`."""
        if shutil.which(self._words[0]) is None:
            raise ManagerError(f"{self._words[0]} is no program on PATH")

    def release(self, change: NodeChange) -> str:
        """See `JobManager.release`."""
        return self._ask({"action": "release", **asdict(change)})

    def restart(self, iteration: int, num_nodes: int) -> str:
        """See `JobManager.restart`."""
        return self._ask({"action": "restart", "iteration": iteration, "num_nodes": num_nodes})

    def _ask(self, what: dict[str, Any]) -> str:
        return _one_line(_run(self._words, json.dumps(what), self._timeout_s))


class SlurmManager:
    """Shrinks the SLURM job that this process runs in.

    Args:
        environment: of this process; what SLURM says of the smaller job is written into it.
        timeout_s: after which a call is given up.
    """

    def __init__(
        self,
        environment: MutableMapping[str, str] = os.environ,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._environment = environment
        self._timeout_s = timeout_s

    def check(self, restarts: bool = False) -> None:
        """See `JobManager.check`: inside a job that runs and that this user may change."""
        if restarts:
            self._restart_note()
        job = self._job()
        owner = re.search(r"\((\d+)\)", job.get("UserId", ""))
        if owner is not None and os.getuid() not in (0, int(owner[1])):
            raise ManagerError(f"job {self._job_id} belongs to {job['UserId']}, not to this user")
        if job.get("JobState") != "RUNNING":
            raise ManagerError(f"job {self._job_id} is {job.get('JobState', 'unknown')}")

    def release(self, change: NodeChange) -> str:
        """See `JobManager.release`."""
        self.check()
        job = self._job()
        held = self._hosts(job["NodeList"])
        freed = set(change.freed_nodes)
        if not freed:
            return "no whole node became free"
        if job.get("BatchHost") in freed:
            raise ManagerError(f"{job['BatchHost']} runs the batch script and cannot be released")
        for what, names in (("freed", freed), ("kept", set(change.kept_nodes))):
            if strangers := sorted(names - set(held)):
                raise ManagerError(
                    f"{what} nodes {strangers} are not among those of job {self._job_id}: {held}"
                )
        kept = [name for name in held if name not in freed]
        self._scontrol("update", f"JobId={self._job_id}", f"NodeList={','.join(kept)}")
        self._await_nodes(kept)
        self._apply_resize_file()
        return f"job {self._job_id} goes on with {','.join(kept)}"

    def restart(self, iteration: int, num_nodes: int) -> str:
        """See `JobManager.restart`: the batch script submits itself, as a note says.

        A running job cannot have nodes added, and only the script knows how it was submitted.
        """
        note = self._restart_note()
        try:
            note.write_text(f"{num_nodes}\n")
        except OSError as error:
            raise ManagerError(f"{note} cannot be written: {error.strerror}") from None
        return f"job {self._job_id} submits itself again for {num_nodes} nodes when it has ended"

    def _restart_note(self) -> Path:
        """The file from which the batch script learns that it is to submit itself again."""
        name = self._environment.get(_RESTART_NOTE)
        if not name:
            raise ManagerError(
                f"the batch script does not submit itself again: {_RESTART_NOTE} is not set "
                "(scripts/slurm shows how)"
            )
        return Path(name)

    @property
    def _job_id(self) -> str:
        job_id = self._environment.get("SLURM_JOB_ID", "")
        if not job_id.isdigit():
            raise ManagerError("this is no SLURM job: SLURM_JOB_ID is not set")
        return job_id

    def _job(self) -> dict[str, str]:
        """The fields of the job, as `scontrol` shows them."""
        text = self._scontrol("show", "job", self._job_id, "--oneliner")
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def _hosts(self, node_list: str) -> list[str]:
        return self._scontrol("show", "hostnames", node_list).split()

    def _await_nodes(self, wanted: Sequence[str]) -> None:
        """Wait until the job has exactly these nodes."""
        deadline = time.monotonic() + _SHRUNK_WITHIN_S
        while (found := self._hosts(self._job()["NodeList"])) != list(wanted):
            if time.monotonic() > deadline:
                raise ManagerError(
                    f"job {self._job_id} still has {','.join(found)} instead of {','.join(wanted)}"
                )
            time.sleep(0.2)

    def _apply_resize_file(self) -> None:
        """Take over what SLURM wrote for a shell to source, so that later steps fit the job."""
        file = Path(f"slurm_job_{self._job_id}_resize.sh")
        if not file.is_file():
            return
        for line in file.read_text().splitlines():
            words = shlex.split(line)
            if len(words) == 2 and words[0] == "export" and "=" in words[1]:
                name, _, value = words[1].partition("=")
                self._environment[name] = value
            elif len(words) == 2 and words[0] == "unset":
                self._environment.pop(words[1], None)

    def _scontrol(self, *words: str) -> str:
        return _run(("scontrol", *words), "", self._timeout_s)


def _run(words: Sequence[str], document: str, timeout_s: float) -> str:
    """Run a program to its end and return what it said on standard output.

    Raises:
        ManagerError: It is not there, took too long, or ended with another status than 0.
    """
    program = shlex.join(words)
    try:
        done = subprocess.run(
            list(words),
            input=document,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ManagerError(f"{program} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ManagerError(f"{program} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = _one_line(done.stdout + done.stderr) or "no word"
        raise ManagerError(f"{program} ended with status {done.returncode}: {said}")
    return done.stdout


def _one_line(text: str) -> str:
    return "; ".join(filter(None, map(str.strip, text.splitlines())))

"""A real SLURM with four virtual nodes on this machine, and the jobs of a tiny GPT in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SCRIPTS = ROOT / "scripts" / "slurm"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


class Cluster:
    """What is asked of it.

    Args:
        folder: where jobs run and write `NAME.out`.
        environment: of every command and job.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)

    def run(self, *words: object) -> str:
        """Run a SLURM command and return what it printed."""
        done = subprocess.run(
            list(map(str, words)), cwd=self._folder, env=self._environment, check=True,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout.strip()

    def submit(self, name: str, num_nodes: int, *words: object) -> str:
        """Submit a batch script whose output goes to `NAME.out`; returns the job's number."""
        return self.run(
            "sbatch", "--parsable", f"--nodes={num_nodes}", "--ntasks-per-node=1",
            f"--output={self._folder / name}.out", *words,
        )  # fmt: skip

    def train(self, name: str, *words: str, launcher: str = "srun") -> str:
        """Submit a run of four nodes, one rank on each."""
        exported = f"--export=ALL,LAUNCHER={launcher}"
        return self.submit(name, 4, exported, _SCRIPTS / "multi_node.sbatch", *words)

    def state(self, job: str) -> tuple[str, str]:
        """State of a job and its nodes."""
        text = self.run("scontrol", "show", "job", job, "--oneliner")
        fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
        return fields["JobState"], fields.get("NodeList", "")

    def idle_nodes(self) -> set[str]:
        """Names of nodes that no job holds."""
        return set(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())

    def wait_for_end(self, job: str, timeout_s: float) -> str:
        """Wait until a job has ended and return its state."""
        self.wait_for(lambda: self.state(job)[0] in _ENDED, timeout_s)
        return self.state(job)[0]

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Look four times a second.

        Raises:
            TimeoutError: With the ends of what the jobs wrote.
        """
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s:g} s; the jobs wrote:\n{self.output()}")
            time.sleep(0.25)

    def output(self) -> str:
        """The ends of what the jobs wrote."""
        files = sorted(self._folder.glob("*.out"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-6000:]}" for file in files)


def is_installed() -> bool:
    """Whether the packages slurm-wlm and munge are there."""
    path = os.environ["PATH"] + ":/usr/sbin"
    return all(shutil.which(program, path=path) for program in ("slurmctld", "munged"))


@contextmanager
def local_cluster(folder: Path) -> Iterator[Cluster]:
    """Start four virtual nodes n0 to n3 whose files are in `folder`, and stop them again."""
    assert is_installed(), "install slurm-wlm and munge"
    local = _SCRIPTS / "local_cluster.sh"
    environment = {
        **os.environ, "SLURM_CONF": str(folder / "slurm" / "slurm.conf"),
        "SBATCH_GPUS_PER_NODE": "0", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    try:
        subprocess.run([local, "start", folder / "slurm"], check=True, timeout=120)
        yield Cluster(folder, environment)
    finally:
        subprocess.run([local, "stop", folder / "slurm"], check=False, timeout=90)

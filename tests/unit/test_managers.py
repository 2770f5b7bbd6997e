"""Job managers, with a fake `scontrol` on PATH that logs its arguments (cases.md, row 37)."""

import json
import os
import stat
import sys
import time

import pytest

from megatron_dynmo.elastic.managers import (
    CommandManager,
    ManagerError,
    NodeChange,
    SlurmManager,
    make_manager,
)

CHANGE = NodeChange(40, (2, 3), ("n2", "n3"), ("n0", "n1"))

SCONTROL = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
state = Path(os.environ["FAKE"]) / "state.json"
with open(Path(os.environ["FAKE"]) / "calls", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
job = json.loads(state.read_text())
words = sys.argv[1:]
if words[:2] == ["show", "job"]:
    print(" ".join(f"{{k}}={{v}}" for k, v in job.items()))
elif words[:2] == ["show", "hostnames"]:
    print("\\n".join(words[2].split(",")))
elif words[0] == "update":
    if os.environ.get("REFUSES"):
        sys.exit("scontrol: error: Access/permission denied")
    settings = dict(word.split("=", 1) for word in words[1:])
    job["NodeList"] = settings["NodeList"]
    state.write_text(json.dumps(job))
    Path(f"slurm_job_{{settings['JobId']}}_resize.sh").write_text(
        f'export SLURM_NODELIST="{{job["NodeList"]}}"\\nexport SLURM_JOB_NUM_NODES=2\\n'
        "unset SLURM_TASKS_PER_NODE\\n"
    )
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job on n0 to n3, as the fake scontrol knows it; what it was called with by `calls`."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCONTROL)
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fields = {
        "JobId": "77", "UserId": f"me({os.getuid()})", "JobState": "RUNNING",
        "BatchHost": "n0", "NodeList": "n0,n1,n2,n3",
    }  # fmt: skip

    class Job:
        def set(self, **changes):
            (tmp_path / "state.json").write_text(json.dumps(fields | changes))

        @property
        def updates(self):
            calls = map(json.loads, (tmp_path / "calls").read_text().splitlines())
            return [call[1:] for call in calls if call[0] == "update"]

    Job().set()
    return Job()


def slurm():
    return SlurmManager({"SLURM_JOB_ID": "77", "SLURM_TASKS_PER_NODE": "1(x4)"})


def test_slurm_shrinks_its_own_job_once_and_by_name(job):
    manager = slurm()
    answer = manager.release(CHANGE)
    assert job.updates == [["JobId=77", "NodeList=n0,n1"]]
    assert "goes on with n0,n1" in answer
    # What SLURM wrote for a shell to source is in force for later steps.
    assert manager._environment["SLURM_NODELIST"] == "n0,n1"
    assert manager._environment["SLURM_JOB_NUM_NODES"] == "2"
    assert "SLURM_TASKS_PER_NODE" not in manager._environment


def test_slurm_never_drops_the_batch_host(job):
    job.set(BatchHost="n2")
    with pytest.raises(ManagerError, match="n2 runs the batch script"):
        slurm().release(CHANGE)
    assert job.updates == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"UserId": "other(4711)"}, "belongs to other"),
        ({"JobState": "COMPLETING"}, "is COMPLETING"),
        ({"NodeList": "n0,n1,n2"}, r"freed nodes \['n3'\]"),
        ({"NodeList": "n0,n2,n3"}, r"kept nodes \['n1'\]"),
    ],
)
def test_slurm_checks_before_it_asks(job, fields, said, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    job.set(**{"UserId": "me(1000)", **fields})
    with pytest.raises(ManagerError, match=said):
        slurm().release(CHANGE)
    assert job.updates == []


def test_slurm_notes_for_how_many_nodes_the_script_submits_itself(job, tmp_path):
    note = tmp_path / "note"
    manager = SlurmManager({"SLURM_JOB_ID": "77", "DYNMO_RESTART_FILE": str(note)})
    manager.check(restarts=True)
    assert "77 submits itself again for 4 nodes" in manager.restart(40, 4)
    assert note.read_text() == "4\n"
    with pytest.raises(ManagerError, match="DYNMO_RESTART_FILE is not set"):
        slurm().restart(40, 4)
    slurm().check()
    with pytest.raises(ManagerError, match="DYNMO_RESTART_FILE is not set"):
        slurm().check(restarts=True)
    with pytest.raises(ManagerError, match="DYNMO_RESTART_FILE is not set"):
        SlurmManager({"SLURM_JOB_ID": "77", "DYNMO_RESTART_FILE": ""}).check(restarts=True)
    manager = SlurmManager({"SLURM_JOB_ID": "77", "DYNMO_RESTART_FILE": str(note / "x")})
    with pytest.raises(ManagerError, match="cannot be written: Not a directory"):
        manager.restart(40, 4)


def test_slurm_says_when_it_was_refused(job, monkeypatch):
    monkeypatch.setenv("REFUSES", "1")
    with pytest.raises(ManagerError, match="status 1: scontrol: error: Access/permission denied"):
        slurm().release(CHANGE)


def test_slurm_needs_a_job_and_scontrol(tmp_path, monkeypatch):
    with pytest.raises(ManagerError, match="no SLURM job"):
        SlurmManager({}).check()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ManagerError, match="cannot be run: No such file"):
        slurm().check()


def test_command_gets_the_change_as_json():
    echo = "import sys; print('got', sys.stdin.read())"
    answer = CommandManager((sys.executable, "-c", echo)).release(CHANGE)
    assert answer.startswith("got ")
    assert json.loads(answer[4:]) == {
        "action": "release", "iteration": 40, "ranks": [2, 3],
        "freed_nodes": ["n2", "n3"], "kept_nodes": ["n0", "n1"],
    }  # fmt: skip
    answer = CommandManager((sys.executable, "-c", echo)).restart(40, 4)
    assert json.loads(answer[4:]) == {"action": "restart", "iteration": 40, "num_nodes": 4}


def test_command_that_fails_hangs_or_is_missing():
    with pytest.raises(ManagerError, match="status 3: no"):
        CommandManager((sys.executable, "-c", "import sys; print('no'); sys.exit(3)")).release(
            CHANGE
        )
    started = time.monotonic()
    with pytest.raises(ManagerError, match=r"did not answer within 0\.3 s"):
        CommandManager((sys.executable, "-c", "import time; time.sleep(60)"), 0.3).release(CHANGE)
    assert time.monotonic() - started < 5
    with pytest.raises(ManagerError, match="no program on PATH"):
        CommandManager(("no-such-program",)).check()


def test_managers_by_name():
    assert make_manager("none") is None
    assert isinstance(make_manager("slurm"), SlurmManager)
    assert isinstance(make_manager("command:true"), CommandManager)

"""The command line: one-line answers, flags that reach their owner. No Megatron, no torch."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynmo import __main__ as command
from megatron_dynmo import launch
from megatron_dynmo.commands import run as run_command
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError, DynMoError, MigrationError, PatchError

# Runs a command with fake patches: the flags and the script are real, Megatron is not needed.
WITHOUT_MEGATRON = """
import runpy, sys, types
import megatron_dynmo
megatron_dynmo.enable = lambda config: print("mode", config.mode)
training = types.ModuleType("megatron.training.training")
training._STARTUP_TIMESTAMPS = {"pretrain_entry": None}
sys.modules["megatron.training.training"] = training
runpy.run_module("megatron_dynmo", run_name="__main__", alter_sys=True)
"""

TRAINS = """
import sys
if training := sys.modules.get("megatron.training.training"):
    training._STARTUP_TIMESTAMPS["pretrain_entry"] = 1.0
"""


def dynmo(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_MEGATRON, *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
    )


def error_of(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that a wrong use is answered with."""
    assert result.returncode == 2, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that reports how it was started, and counts as one that trains."""
    path = tmp_path / "folder" / "train.py"
    path.parent.mkdir()
    path.write_text(
        TRAINS
        + "import json\n"
        + "print(json.dumps([sys.argv, sys.path[0], __name__, __package__ or None]))\n"
    )
    return path


def report_of(result: subprocess.CompletedProcess[str]) -> list:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


class TestCommand:
    def test_help_needs_neither_torch_nor_megatron(self):
        code = (
            "import sys\n"
            "sys.modules.update(torch=None, megatron=None, numpy=None)\n"
            "from megatron_dynmo.__main__ import main\n"
            "sys.exit(main(['--help']))"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        for name, entry in command.COMMANDS.items():
            assert name in result.stdout
            assert entry.help in " ".join(result.stdout.split())

    def test_no_command_prints_the_help(self, capsys):
        assert command.main([]) == 0
        assert "usage: dynmo" in capsys.readouterr().out

    def test_version(self, capsys):
        with pytest.raises(SystemExit) as leave:
            command.main(["--version"])
        assert leave.value.code == 0
        assert capsys.readouterr().out == f"dynmo {command.__version__}\n"

    @pytest.mark.parametrize("name", sorted(command.COMMANDS))
    def test_every_command_has_a_help_of_its_own(self, name, capsys):
        with pytest.raises(SystemExit) as leave:
            command.main([name, "--help"])
        assert leave.value.code == 0
        assert len(capsys.readouterr().out.splitlines()) > 5

    def test_unknown_command_is_answered_with_the_nearest(self):
        assert error_of(dynmo("rum")) == "dynmo: error: unknown command rum; did you mean run?"

    @pytest.mark.parametrize(
        "words", [["--versio"], ["run", "--hel"], ["patches", "--jso", "list"]]
    )
    def test_abbreviations_are_not_taken(self, words):
        assert "unknown argument" in error_of(dynmo(*words))


class TestRun:
    def test_script_sees_what_python_would_set(self, script):
        words, cwd = ["folder/train.py", "--lr", "1", "a b"], script.parent.parent
        python = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd)
        assert report_of(dynmo("run", *words, cwd=cwd)) == report_of(python)

    def test_script_imports_its_neighbours(self, script):
        (script.parent / "neighbour.py").write_text("here = True\n")
        script.write_text(TRAINS + "import neighbour\nprint(neighbour.here)\n")
        result = dynmo("run", str(script), cwd=Path("/"))
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "True"

    def test_own_modules_win_over_stand_ins(self, script):
        (script.parent / "gpt_builders.py").write_text("origin = 'beside the script'\n")
        script.write_text(TRAINS + "import gpt_builders\nprint(gpt_builders.origin)\n")
        result = dynmo("run", str(script))
        assert result.stdout.splitlines()[-1] == "beside the script"

    def test_modules_on_a_path_that_the_script_adds_win_too(self, script, tmp_path):
        root = tmp_path / "checkout"
        root.mkdir()
        (root / "model_provider.py").write_text("origin = 'checkout'\n")
        script.write_text(
            TRAINS
            + f"sys.path.append({str(root)!r})\nimport model_provider\nprint(model_provider.origin)"
        )
        assert dynmo("run", str(script)).stdout.splitlines()[-1] == "checkout"

    def test_exit_status_and_traceback_are_the_scripts_own(self, script):
        script.write_text("raise SystemExit(7)")
        assert dynmo("run", str(script)).returncode == 7
        script.write_text("raise RuntimeError('mine')")
        failed = dynmo("run", str(script))
        assert failed.returncode == 1
        assert "RuntimeError: mine" in failed.stderr

    @pytest.mark.parametrize(
        ("words", "mode"),
        [
            (["--dynmo-mode", "observe", "SCRIPT", "--log-interval", "1"], "observe"),
            (["SCRIPT", "--log-interval", "1", "--dynmo-mode", "observe"], "observe"),
            (["SCRIPT", "--dynmo-mode=observe", "--log-interval", "1"], "observe"),
            (["--dynmo-mode=observe", "SCRIPT", "--log-interval", "1"], "observe"),
            (["SCRIPT", "--data-path", "A", "B", "--dynmo-mode", "observe"], "observe"),
            (["SCRIPT", "--dynmo-mode", "observe", "--data-path", "A", "B"], "observe"),
            (["--dynmo-mode", "off", "SCRIPT", "--dynmo-mode", "observe"], "observe"),
            (["SCRIPT", "--dynmo-mode", "off", "--dynmo-mode", "observe"], "observe"),
            (["--dynmo-layer-rng", "SCRIPT", "--dynmo-mode", "observe"], "observe"),
            (["--dynmo-layer-rng", "--dynmo-window", "5", "SCRIPT", "1"], "balance"),
            (["SCRIPT"], "balance"),
        ],
    )
    def test_our_flags_may_stand_anywhere(self, script, words, mode):
        words = [str(script) if word == "SCRIPT" else word for word in words]
        result = dynmo("run", *words)
        argv = report_of(result)[0]
        assert result.stdout.splitlines()[0] == f"mode {mode}"
        assert argv[0] == str(script)
        # Nothing is lost, and what stood before the script is now among its arguments.
        at = words.index(str(script))
        assert argv[1:] == words[:at] + words[at + 1 :]
        assert DynMoConfig.from_argv(argv[1:]).mode == mode

    @pytest.mark.parametrize(
        ("words", "answer"),
        [
            ([], "run needs a training script"),
            (["--dynmo-mode", "observe"], "run needs a training script"),
            (["nowhere.py"], "nowhere.py does not exist"),
            (["/"], "/ is not a file"),
            (["--log-interval", "1", "SCRIPT"], "arguments come after SCRIPT"),
            (["--dynmo-balance", "partition", "SCRIPT"], "did you mean --dynmo-balancer?"),
            (["SCRIPT", "--dynmo-balance", "partition"], "did you mean --dynmo-balancer?"),
            (["SCRIPT", "--dynmo-modes", "observe"], "did you mean --dynmo-mode?"),
            (["SCRIPT", "--dynmo-mode", "obs"], "invalid choice: 'obs'"),
            (["--dynmo-mode", "obs", "SCRIPT"], "invalid choice: 'obs'"),
            (["SCRIPT", "--dynmo-mode"], "expected one argument"),
        ],
    )
    def test_wrong_use_is_answered_in_one_line(self, script, words, answer):
        words = [str(script) if word == "SCRIPT" else word for word in words]
        assert answer in error_of(dynmo("run", *words))

    def test_script_that_never_trains(self, script):
        script.write_text("print('nothing to see')")
        assert "without calling megatron.training.pretrain" in error_of(dynmo("run", str(script)))

    def test_any_script_runs_when_we_are_off(self, script):
        script.write_text("print('done')")
        result = dynmo("run", str(script), "--dynmo-mode", "off")
        assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "done")

    def test_script_sees_none_of_our_flags_when_we_are_off(self, script):
        others = ["--data-path", "0.5", "A", "-1", "B", "--fp16", "-x", "--lr", "-1e-3", "--", "C"]
        words = ["--dynmo-mode", "off", str(script), *others[:5]]
        words += ["--dynmo-layer-rng", *others[5:]]
        assert report_of(dynmo("run", *words))[0] == [str(script), *others]


class TestOneLine:
    def test_rank_0_speaks_and_every_rank_leaves_with_2(self, script):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", WITHOUT_MEGATRON, "run"],
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                },
            )
            for rank in (1, 0)
        ]
        silent, speaking = ranks
        assert "run needs a training script" in speaking.communicate()[1]
        # Rank 1 stays until the launcher ends the job, and then leaves with the same status.
        silent.send_signal(signal.SIGTERM)
        assert silent.communicate()[1] == ""
        assert [rank.returncode for rank in ranks] == [2, 2]

    def test_many_problems_make_one_line(self, capsys):
        with pytest.raises(SystemExit) as leave, launch.one_line_errors():
            raise PatchError("2 problems:\n  - first\n\n  - second\n")
        assert leave.value.code == 2
        assert capsys.readouterr().err == "dynmo: error: 2 problems: - first; - second\n"

    @pytest.mark.parametrize("mistakes", [(), (DynMoError,)])
    def test_a_failed_move_keeps_its_traceback_on_every_rank(self, mistakes, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(MigrationError), launch.one_line_errors(*mistakes):
            raise MigrationError("layer 3 is nowhere")

    @pytest.mark.parametrize(
        ("env", "speaks"),
        [
            ({}, True),
            ({"RANK": "0", "LOCAL_RANK": "0"}, True),
            ({"RANK": "8", "LOCAL_RANK": "0"}, False),
            ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ],
    )
    def test_who_speaks(self, env, speaks, monkeypatch, capsys):
        monkeypatch.setattr(launch, "_GRACE_S", 0.0)
        monkeypatch.setattr(launch, "_HEAD_START_S", 0.0)
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit), launch.one_line_errors():
            raise ConfigError("wrong")
        signal.signal(signal.SIGTERM, before)
        assert (capsys.readouterr().err == "dynmo: error: wrong\n") == speaks

    def test_each_node_speaks_of_its_own_installation(self, monkeypatch, capsys):
        monkeypatch.setenv("RANK", "8")
        monkeypatch.setenv("LOCAL_RANK", "0")
        with pytest.raises(SystemExit), launch.one_line_errors():
            raise PatchError("this node has another Megatron")
        assert "another Megatron" in capsys.readouterr().err


def test_flags_before_the_script_are_found_whatever_their_arity():
    words = ["--dynmo-layer-rng", "--dynmo-window", "5", "x.py", "--dynmo-mode", "observe"]
    parser = command.build_parser("run")
    namespace, unknown = parser.parse_known_args(["run", *words])
    namespace.command_argv = words
    assert unknown == []
    assert namespace.script == "x.py"
    assert run_command._flags_before_script(namespace) == words[:3]

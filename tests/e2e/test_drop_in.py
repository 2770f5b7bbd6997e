"""The two ways in, with real Megatron: a user's script and the drop-in, on the same data."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dynmo.corpus import build_corpus
from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.telemetry.events import read_events
from tests.e2e.training import TINY_GPT
from tests.ranks import RanksFailed, run_ranks

FORK = str(Path(__file__).with_name("scripts") / "pretrain_fork.py")
TWO_STAGES = ("--pipeline-model-parallel-size", "2")
# Without --mock-data and --split 98,1,1.
REAL_DATA = [word for word in TINY_GPT if word not in ("--mock-data", "--split", "98,1,1")]


def drop_in(rank: int, world_size: int, *words: str) -> None:
    """Be one rank of the drop-in."""
    from megatron_dynmo import pretrain_gpt

    pretrain_gpt.main(list(words))


def user_script(rank: int, world_size: int, *words: str) -> None:
    """Be one rank of `dynmo run`."""
    from megatron_dynmo.__main__ import main

    sys.exit(main(["run", *words]))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two data sets of 300 documents each: the flags of their tokenizer, and their prefixes."""
    root = tmp_path_factory.mktemp("corpora")
    words = "def class return import self yield lambda".split()
    prefixes, tokenizer = [], []
    for seed, name in enumerate(("a", "b")):
        text = root / f"{name}.jsonl"
        with text.open("w") as file:
            for number in range(300):
                lines = [
                    f"{words[(number * line + seed) % 7]} {words[(number + line) % 7]}_{number}"
                    for line in range(30)
                ]
                file.write(json.dumps({"text": "\n".join(lines)}) + "\n")
        made, _ = build_corpus(root / name, sources=[text], vocab_size=300)
        flags = made.megatron_args
        at = flags.index("--data-path")
        prefixes.append(flags[at + 1])
        tokenizer = tokenizer or flags[:at] + flags[at + 2 :]
    return tokenizer, *prefixes


def text_of(log_dir: Path) -> str:
    return "".join(path.read_text() for path in sorted(log_dir.glob("rank*.log")))


def numbers(log_dir: Path) -> list[str]:
    """Return every printed loss and gradient norm, of training and validation, in order."""
    kept = []
    for line in text_of(log_dir).splitlines():
        fields = [field.strip() for field in line.split("|")]
        if "iteration" in line and "loss" in line:
            kept += [field for field in fields if "loss" in field or "grad norm" in field]
    return kept


def exact(folder: Path) -> list[tuple[str, str]]:
    """Return loss and gradient norm of each iteration, to the last bit."""
    events = read_events(folder / EVENTS_FILE)
    return [
        (event["lm_loss_hex"], event["grad_norm_hex"])
        for event in events
        if event["event"] == "iteration"
    ]


def both_ways(tmp_path: Path, *words: str) -> tuple[list[Any], list[Any]]:
    """Train two ranks with the fork and with the drop-in; return the numbers of each."""
    results = []
    for name, way, first in (("fork", user_script, [FORK]), ("ours", drop_in, [])):
        log = tmp_path / f"{name}.log"
        run_ranks(way, 2, *first, *words, "--dynmo-log-dir", str(tmp_path / name), log_dir=log)
        results.append([exact(tmp_path / name), numbers(log)])
    return results[0], results[1]


class TestSameAsAUsersScript:
    """The fork shares no line with the drop-in, so what they agree on is Megatron's."""

    def test_mock_data(self, tmp_path):
        fork, ours = both_ways(tmp_path, *TINY_GPT, *TWO_STAGES, "--dynmo-mode", "observe")
        assert fork == ours
        assert len(ours[0]) == 4
        assert "hello from the fork" in text_of(tmp_path / "fork.log")
        assert "building GPT model" in text_of(tmp_path / "fork.log")

    def test_weighted_blend_with_validation_during_training(self, tmp_path, corpora):
        tokenizer, a, b = corpora
        fork, ours = both_ways(
            tmp_path,
            *REAL_DATA,
            *tokenizer,
            *TWO_STAGES,
            *("--data-path", "10", a, "20", b, "--dynmo-mode", "observe"),
            *("--split", "90,8,2", "--eval-interval", "2", "--eval-iters", "1"),
            *("--data-cache-path", str(tmp_path / "cache")),
        )
        assert fork == ours
        # After 2 and 4 iterations, then at the end on the validation and on the test set.
        assert len(ours[0]) == 4
        assert sum("lm loss value" in number for number in ours[1]) == 4

    @pytest.mark.matrix
    def test_each_part_from_its_own_data(self, tmp_path, corpora):
        tokenizer, a, b = corpora
        fork, ours = both_ways(
            tmp_path,
            *REAL_DATA,
            *tokenizer,
            *TWO_STAGES,
            *("--train-data-path", a, "--valid-data-path", b, "--test-data-path", b),
            *("--eval-interval", "100", "--eval-iters", "1", "--dynmo-mode", "observe"),
        )
        assert fork == ours
        assert len(ours[0]) == 4


class TestDropIn:
    @pytest.mark.matrix
    def test_fill_in_the_middle_changes_the_data(self, tmp_path, corpora):
        tokenizer, a, _ = corpora
        words = [*REAL_DATA, *tokenizer, "--data-path", a, "--split", "90,8,2"]
        end = "<|endoftext|>"
        fim = ["--fim-data", "--fim-rate", "1.0", "--fim-eod-token", end, "--fim-pad-token", end]
        fim += ["--fim-prefix-token", "d", "--fim-middle-token", "e", "--fim-suffix-token", "f"]
        for name, more in (("fim", fim), ("plain", [])):
            more = [*more, "--dynmo-mode", "observe", "--dynmo-log-dir", str(tmp_path / name)]
            run_ranks(drop_in, 1, *words, *more)
        assert len(exact(tmp_path / "fim")) == len(exact(tmp_path / "plain")) == 4
        assert exact(tmp_path / "fim") != exact(tmp_path / "plain")

    @pytest.mark.matrix
    def test_off_prints_what_observing_prints(self, tmp_path):
        for mode in ("off", "observe"):
            words = [*TINY_GPT, *TWO_STAGES, "--dynmo-mode", mode]
            run_ranks(drop_in, 2, *words, log_dir=tmp_path / mode)
        assert numbers(tmp_path / "off") == numbers(tmp_path / "observe")
        assert len(numbers(tmp_path / "off")) >= 4 * 2

    @pytest.mark.matrix
    def test_checkpoint_goes_on_where_it_was_saved(self, tmp_path):
        words = [*TINY_GPT, *TWO_STAGES, "--dynmo-mode", "observe", "--ckpt-format", "torch_dist"]
        checkpoint = str(tmp_path / "checkpoint")
        halves = {
            "whole": [],
            "first": ["--save", checkpoint, "--save-interval", "2", "--exit-interval", "2"],
            "second": ["--load", checkpoint],
        }
        for name, more in halves.items():
            run_ranks(drop_in, 2, *words, *more, "--dynmo-log-dir", str(tmp_path / name))
        whole = exact(tmp_path / "whole")
        assert len(whole) == 4
        assert exact(tmp_path / "first") + exact(tmp_path / "second") == whole

    def test_tensor_parallel_run_needs_no_environment_variable(self, tmp_path):
        words = [*TINY_GPT, "--tensor-model-parallel-size", "2", "--dynmo-mode", "observe"]
        run_ranks(drop_in_without_cuda_variable, 2, *words, log_dir=tmp_path)
        assert len(numbers(tmp_path)) >= 4 * 2

    @pytest.mark.matrix
    def test_a_signal_to_one_worker_saves_once_and_ends_all(self, tmp_path):
        """Moves go on while the signal comes: the checkpoint is of a whole iteration."""
        checkpoint = tmp_path / "checkpoint"
        moves = ";".join(
            f"{iteration}:{'Ettt|tL' if iteration % 10 else 'Et|tttL'}"
            for iteration in range(5, 400, 5)
        )
        words = [*TINY_GPT, *TWO_STAGES, "--train-iters", "400", "--exit-signal-handler"]
        words += ["--save", str(checkpoint), "--save-interval", "1000", "--dynmo-log-dir"]
        run_ranks(
            drop_in_until_signal, 2, *words, str(tmp_path / "first"), "--dynmo-force-layout", moves
        )
        saved = [int(folder.name[5:]) for folder in checkpoint.glob("iter_*")]
        assert len(saved) == 1
        assert len(exact(tmp_path / "first")) == saved[0] < 400

        words += [str(tmp_path / "second"), "--load", str(checkpoint)]
        run_ranks(drop_in, 2, *words, "--exit-interval", str(saved[0] + 2))
        events = read_events(tmp_path / "second" / EVENTS_FILE)
        trained = [event["iteration"] for event in events if event["event"] == "iteration"]
        assert trained == [saved[0] + 1, saved[0] + 2]


class TestAnswers:
    @pytest.mark.parametrize("way", ["drop-in", "run"])
    def test_help_shows_both_groups_of_flags(self, way, tmp_path):
        if way == "run":
            run_ranks(user_script, 1, FORK, "--help", log_dir=tmp_path)
        else:
            run_ranks(drop_in, 1, "--help", log_dir=tmp_path)
        text = text_of(tmp_path)
        assert ("--greeting" in text) == (way == "run")
        for flag in ("--num-layers", "--dynmo-mode", "--dynmo-log-dir"):
            assert flag in text

    @pytest.mark.matrix
    def test_split_without_documents_does_not_hang(self, tmp_path, corpora):
        tokenizer, a, _ = corpora
        words = [*REAL_DATA, *tokenizer, "--data-path", a, "--split", "9990,5,5"]
        with pytest.raises(RanksFailed, match="SystemExit: 2"):
            run_ranks(drop_in, 2, *words, *TWO_STAGES, log_dir=tmp_path, timeout_s=60)
        lines = [line for line in text_of(tmp_path).splitlines() if "dynmo: error" in line]
        assert len(lines) == 1
        assert f"--split 9990,5,5 leaves no document of {a} (it has 300)" in lines[0]


class TestTorchrun:
    """The commands as users type them."""

    @pytest.mark.parametrize(
        "command",
        [
            pytest.param(["megatron_dynmo.pretrain_gpt"], id="drop-in"),
            # The same in ranks that the tests start is above.
            pytest.param(["megatron_dynmo", "run", FORK], id="run", marks=pytest.mark.matrix),
        ],
    )
    def test_trains(self, command, tmp_path):
        words = [*TINY_GPT, *TWO_STAGES, "--dynmo-mode", "observe", "--train-iters", "2"]
        result = torchrun(*command, *words, "--dynmo-log-dir", str(tmp_path / "log"))
        assert result.returncode == 0, result.stderr[-3000:]
        assert "iteration        2/       2" in result.stdout
        assert len(exact(tmp_path / "log")) == 2

    @pytest.mark.parametrize(
        ("command", "answer"),
        [
            (["megatron_dynmo.pretrain_gpt", "--dynmo-balance", "x"], "mean --dynmo-balancer?"),
            pytest.param(
                ["megatron_dynmo", "run", "nowhere.py"],
                "nowhere.py does not exist",
                marks=pytest.mark.matrix,
            ),
        ],
        ids=["drop-in", "run"],
    )
    def test_wrong_use_is_one_line_and_status_2_on_every_rank(self, command, answer):
        result = torchrun(*command)
        assert result.returncode != 0
        lines = [line for line in result.stderr.splitlines() if line.startswith("dynmo: ")]
        assert len(lines) == 1
        assert answer in lines[0]
        statuses = re.findall(r"exitcode\s*: (-?\d+)", result.stderr)
        assert set(statuses) == {"2"}


def drop_in_without_cuda_variable(rank: int, world_size: int, *words: str) -> None:
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    drop_in(rank, world_size, *words)


def drop_in_until_signal(rank: int, world_size: int, *words: str) -> None:
    """Train; rank 1 gets a SIGTERM once the log shows a dozen iterations."""
    events = Path(words[words.index("--dynmo-log-dir") + 1]) / EVENTS_FILE

    def watch() -> None:
        while not events.is_file() or events.read_text().count('"iteration_ms"') < 12:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    if rank == 1:
        threading.Thread(target=watch, daemon=True).start()
    drop_in(rank, world_size, *words)


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    """Start two ranks with `torchrun -m COMMAND` and wait for them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", "2", "-m", *command],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

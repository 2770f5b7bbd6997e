"""Packing to fewer stages and back changes nothing, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynmo.telemetry.events import read_events
from tests.e2e.matrix import OVERLAP, TP
from tests.e2e.parity import EVENTS_FILE, Cell, Trace, drop_in, read_trace
from tests.e2e.test_leaks import train as watched
from tests.e2e.training import TINY_GPT
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def cell(name, ranks, stages, packs, *flags, iterations=10):
    """`moves` of such a cell is the text of --dynmo-force-pack."""
    return Cell(name, ranks, ("--pipeline-model-parallel-size", str(stages), *flags), packs,
                iterations)  # fmt: skip


CI = (cell("bf16 with loss of layers, PP 4", 4, 4, "2:3;4:2;7:4", "--bf16"),)
MATRIX = (
    cell("fp32, PP 4, tied", 4, 4, "1:2;2:4;3:3;5:2;6:4"),
    cell("fp16 with loss scaling, PP 3", 3, 3, "2:2;6:3", "--fp16", "--num-layers", "6",
         "--loss-scale-window", "2"),
    cell("bf16 distributed optimizer, PP 4 x DP 2", 8, 4, "2:3;4:2;7:4", "--bf16",
         "--use-distributed-optimizer"),
    cell("bf16 distributed optimizer, overlap, PP 3 x DP 2", 6, 3, "2:2;5:3", "--bf16", *OVERLAP,
         "--num-layers", "6"),
    cell("fp32 distributed optimizer, PP 3 x DP 2, untied", 6, 3, "2:2;5:3;7:2",
         "--use-distributed-optimizer", "--num-layers", "6",
         "--untie-embeddings-and-output-weights"),
    cell("MoE with EP 2, PP 3", 6, 3, "2:2;5:3", "--num-layers", "6", "--num-experts", "4",
         "--moe-router-topk", "2", "--disable-bias-linear", "--moe-token-dispatcher-type",
         "alltoall", "--expert-model-parallel-size", "2", "--moe-aux-loss-coeff", "1e-2"),
    cell("dropout by layer, PP 3", 3, 3, "2:2;5:3", "--num-layers", "6", "--dynmo-layer-rng",
         "--attention-dropout", "0.1", "--hidden-dropout", "0.1"),
    cell("bf16, PP 4 x 2 virtual stages", 4, 4, "2:2;5:4", "--bf16", "--num-layers", "8",
         "--num-virtual-stages-per-pipeline-rank", "2"),
    cell("fp32, PP 3 x TP 2 with sequence parallel", 6, 3, "2:2;5:3", "--num-layers", "6", *TP),
)  # fmt: skip


def train(what: Cell, packs: str, log_dir: Path, *extra: str) -> Trace:
    run_ranks(
        drop_in,
        what.ranks,
        *TINY_GPT,
        *("--train-iters", str(what.iterations), "--lr-decay-iters", str(what.iterations)),
        *("--clip-grad", "1.0", *what.flags, "--dynmo-log-dir", str(log_dir)),
        *("--dynmo-digest-interval", "1", "--dynmo-force-pack", packs, *extra),
        timeout_s=240,
        log_dir=log_dir / "ranks",
    )
    return read_trace(log_dir)


def events(log_dir: Path, *kinds: str):
    return [e for e in read_events(log_dir / EVENTS_FILE) if e["event"] in kinds]


def check(what: Cell, folder: Path):
    still = train(what, f"{what.iterations + 1}:2", folder / "still")
    packed = train(what, what.moves, folder / "packed")
    assert sorted(packed.losses) == list(range(1, what.iterations + 1))
    assert packed.losses == still.losses and packed.grad_norms == still.grad_norms
    assert packed.digests == still.digests and len(packed.digests) == what.iterations
    told = [e["event"] for e in events(folder / "packed", "pack", "park", "rejoin")]
    assert len(told) - told.count("park") == what.num_moves
    return told


@pytest.mark.parametrize("what", CI, ids=lambda what: what.name)
def test_packing_and_coming_back_change_nothing(what, tmp_path):
    assert check(what, tmp_path) == ["pack", "park", "pack", "park", "rejoin"]
    # The rank that logs for Megatron is the same throughout, and no iteration is missing.
    log = (tmp_path / "packed" / "ranks" / "rank3.log").read_text()
    assert [f" iteration {i:8d}/" in log for i in range(1, 11)] == [True] * 10


@pytest.mark.matrix
@pytest.mark.parametrize("what", MATRIX, ids=lambda what: what.name)
def test_packing_changes_nothing_in_other_configurations(what, tmp_path):
    check(what, tmp_path)


def torchrun(ranks: int, *words: str, cwd: Path):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), "-m", "megatron_dynmo.pretrain_gpt", *TINY_GPT, *words],
        cwd=cwd, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip


@pytest.mark.matrix
def test_ranks_exit_with_status_0_under_torchrun(tmp_path):
    """A manager is told after they have left; the survivors train on, and all end well."""
    note = tmp_path / "note.json"
    program = f"import sys; open({str(note)!r}, 'w').write(sys.stdin.read()); print('taken')"
    words = (
        *("--pipeline-model-parallel-size", "4", "--train-iters", "12", "--lr-decay-iters", "12"),
        *("--eval-iters", "1", "--dynmo-log-dir", str(tmp_path)),
    )
    done = torchrun(
        4, *words, "--dynmo-force-pack", "3:2", "--dynmo-release", "exit",
        "--dynmo-job-manager", f'command:{sys.executable} -c "{program}"', cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    trace = read_trace(tmp_path)
    assert sorted(trace.losses) == list(range(1, 13))
    assert json.loads(note.read_text())["ranks"] == [1, 2]
    release = events(tmp_path, "release")
    assert [(e["ranks"], e["answer"]) for e in release] == [([1, 2], "taken")]


# One stage alone adds the gradients of tied weights up, and rounds the norm, in its own way.
RESHARDABLE = (
    *("--bf16", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
    *("--untie-embeddings-and-output-weights", "--clip-grad", "100", "--num-layers", "12"),
)


@pytest.mark.matrix
def test_a_checkpoint_of_a_packed_run_loads_at_any_size(tmp_path):
    """Saved by two of three stages; goes on on one, two and four as if nothing had been."""
    saved = ("--save", str(tmp_path / "saved"), "--save-interval", "5")
    packed = cell("packed", 6, 3, "3:2", *RESHARDABLE)
    whole = train(packed, packed.moves, tmp_path / "whole", *saved)
    for stages in (1, 2, 4):
        what = cell("resumed", 2 * stages, stages, "", *RESHARDABLE)
        resumed = train(
            what, "11:2" if stages > 1 else "", tmp_path / f"{stages}",
            "--load", str(tmp_path / "saved"), "--ckpt-step", "5",
        )  # fmt: skip
        assert sorted(resumed.losses) == list(range(6, 11))
        assert resumed.losses.items() <= whole.losses.items()
        assert resumed.digests.items() <= whole.digests.items() and len(resumed.digests) == 5


@pytest.mark.matrix
def test_twenty_rounds_leak_nothing(tmp_path):
    """Groups, files, threads, modules and bytes: on ranks that stay and on one that comes back."""
    packs = ";".join(f"{i}:{3 if i % 2 else 2}" for i in range(2, 42))
    held = run_ranks(
        watched, 3, "--num-layers", "6", "--pipeline-model-parallel-size", "3", "--bf16",
        "--train-iters", "42", "--lr-decay-iters", "42", "--dynmo-force-pack", packs,
        "--dynmo-log-dir", str(tmp_path), timeout_s=280,
    )  # fmt: skip
    assert [len(of_rank) for of_rank in held] == [42, 22, 42]
    # Each with all three stages; what the first rounds cache stays.
    for rounds in (held[0][7::2], held[1][4:], held[2][7::2]):
        for name in rounds[0]:
            assert [after[name] for after in rounds] == [rounds[0][name]] * len(rounds), name

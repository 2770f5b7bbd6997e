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
from tests.e2e.training import TINY_GPT
from tests.ranks import RanksFailed, run_ranks

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
    """A manager is told after they have left; the survivors train on, save, and all end well."""
    note = tmp_path / "note.json"
    program = f"import sys; open({str(note)!r}, 'w').write(sys.stdin.read()); print('taken')"
    words = (
        *("--pipeline-model-parallel-size", "4", "--train-iters", "12", "--lr-decay-iters", "12"),
        *("--save", str(tmp_path / "ck"), "--save-interval", "12", "--eval-iters", "1"),
        *("--dynmo-log-dir", str(tmp_path), "--dynmo-digest-interval", "12"),
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
    # The checkpoint of two ranks resumes at two stages, where it was.
    resumed = tmp_path / "resumed"
    run_ranks(
        drop_in, 2, *TINY_GPT, *words, "--pipeline-model-parallel-size", "2",
        "--train-iters", "12", "--load", str(tmp_path / "ck"), "--dynmo-log-dir", str(resumed),
    )  # fmt: skip


@pytest.mark.matrix
def test_twenty_changes_leak_nothing(tmp_path):
    """Open files and memory of a rank that stays are the same after the first and the last."""
    packs = ";".join(f"{i}:{2 if i % 2 else 3}" for i in range(1, 41))
    what = cell("leaks", 3, 3, packs, "--num-layers", "6", iterations=42)
    run_ranks(
        counted, 3, *TINY_GPT, *what.flags, "--train-iters", "42", "--lr-decay-iters", "42",
        "--dynmo-force-pack", packs, timeout_s=240, log_dir=tmp_path,
    )  # fmt: skip


def counted(rank, world_size, *argv):
    import torch.distributed as dist

    from megatron_dynmo.adapters.world import World

    seen = []
    reform = World.reform

    def counting(self, *args):
        reform(self, *args)
        files = len(os.listdir("/proc/self/fd"))
        seen.append((files, len(dist.distributed_c10d._world.pg_map)))

    World.reform = counting
    drop_in(rank, world_size, *argv)
    if rank == 0:
        assert len(seen) == 40
        assert seen[-2:] == seen[2:4], seen


@pytest.mark.matrix
def test_a_parked_rank_that_is_gone_is_noticed(tmp_path):
    """The call goes unanswered: training goes on with the stages it has."""
    what = cell("gone", 3, 3, "2:2;4:3", "--num-layers", "6", iterations=8)
    run_ranks(
        deaf, 3, *TINY_GPT, *what.flags, "--train-iters", "8", "--lr-decay-iters", "8",
        "--dynmo-log-dir", str(tmp_path), "--dynmo-force-pack", what.moves, timeout_s=120,
        log_dir=tmp_path / "ranks",
    )  # fmt: skip
    assert sorted(read_trace(tmp_path).losses) == list(range(1, 9))
    assert [e["event"] for e in events(tmp_path, "pack", "rejoin")] == ["pack"]
    assert "do not answer" in (tmp_path / "ranks" / "rank2.log").read_text()


def deaf(rank, world_size, *argv):
    """A parked rank that never looks at a message."""
    from megatron_dynmo import elasticity

    elasticity._ANSWER_S = 1.0
    if rank == 1:
        elasticity.Parked.wait = lambda self: None
    drop_in(rank, world_size, *argv)


@pytest.mark.matrix
def test_a_rank_gone_while_packing_ends_the_run(tmp_path):
    """No iteration is trained without it."""
    what = cell("dies", 3, 3, "2:2", "--num-layers", "6", iterations=8)
    with pytest.raises(RanksFailed) as failure:
        run_ranks(
            dying, 3, *TINY_GPT, *what.flags, "--train-iters", "8", "--lr-decay-iters", "8",
            "--dynmo-log-dir", str(tmp_path), "--dynmo-force-pack", what.moves, timeout_s=120,
        )  # fmt: skip
    assert failure.value.rank == 1
    assert sorted(read_trace(tmp_path).losses) == [1, 2]


def dying(rank, world_size, *argv):
    """The rank that is to be parked dies when the groups are to be made anew."""
    from megatron_dynmo.adapters.world import World

    if rank == 1:
        World.be_alone = lambda self: os._exit(9)
    drop_in(rank, world_size, *argv)

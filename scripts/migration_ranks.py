"""One rank of `make bench-migration`: trains two steps, then moves a layer there and back.

Started through `tests.ranks.run_ranks`, which imports it by name.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_LAYERS = 4
HERE, THERE = "Ett|ttL", "Et|tttL"  # layer 2 goes from rank 0 to rank 1 and back
MODEL = f"""
    --num-layers {NUM_LAYERS} --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4
    --train-iters 2 --lr 1e-3 --lr-decay-iters 8 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 1000 --split 98,1,1 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --num-workers 0 --attention-dropout 0 --hidden-dropout 0 --pipeline-model-parallel-size 2
    --dynmo-force-layout 1000:{HERE}
""".split()


@dataclass
class Move:
    """One move on one rank, beside a plain message of the same bytes.

    Attributes:
        sent_bytes: what this rank sent.
        duration_ms: the whole move, on the slowest rank.
        phase_ms: by phase, on this rank.
        raw_ms: one tensor of as many bytes from the same sender to the same receiver, into new
            memory as a layer's, on the slowest rank.
        raw_used_ms: the same into memory that was in use before: pages that exist already.
        gathered_ms: the same bytes another way: data-parallel replicas gather the shards of each
            other, and every one sends the whole state; None with one replica.
        held_bytes: resident memory of this process before or after the move, whichever is more.
        peak_bytes: largest resident memory in each phase.
    """

    sent_bytes: int
    duration_ms: float
    phase_ms: dict[str, float]
    raw_ms: float
    raw_used_ms: float
    gathered_ms: float | None
    held_bytes: int
    peak_bytes: dict[str, int]


class _Done(Exception):
    """All is measured; training need not go on."""


def measure(rank: int, world_size: int, rounds: int, *flags: str) -> dict[str, Any]:
    """Be one rank.

    Args:
        rank: global rank.
        world_size: number of ranks.
        rounds: how often the layer goes there and back.
        flags: Megatron's, beside `MODEL`.

    Returns:
        `layer_bytes`, bytes of the largest layer's parameters, gradients and optimizer state;
        `moves`, of this rank; `digests_equal`, whether the model at the end is that of before.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    from megatron.training import training

    from megatron_dynmo import launch
    from tests.e2e.training import _pretrain

    sys.argv = ["pretrain_gpt.py", *MODEL, *flags]
    launch.start()
    train_step = training.train_step
    found: dict[str, Any] = {}
    steps = [0]

    def step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        steps[0] += 1
        if steps[0] == 2:  # moments exist from the first step on
            found.update(_bench(args[2], args[3], rounds))
            raise _Done
        return result

    training.train_step = step
    try:
        _pretrain()
    except _Done:
        return found
    raise AssertionError("training ended before its second step")


def _bench(model: Any, optimizer: Any, rounds: int) -> dict[str, Any]:
    from megatron_dynmo.adapters.run import MegatronRun
    from megatron_dynmo.plan import build_plan

    run = MegatronRun(model, optimizer)
    migrator = _watched_migrator(run)
    here, there = run.parse_layout(HERE), run.parse_layout(THERE)
    before = run.digests()
    raw, gathered = _raw_message(run), _gathered_message(run)
    dp_size = run.topology.world_size // 2
    layer = next(iter(run.stage.layers().values()))  # all are alike
    weight_bytes = sum(p.numel() * p.element_size() for p in layer.parameters())
    moves = []
    for number in range(2 * rounds + 1):
        old, new = (there, here) if number % 2 else (here, there)
        held = resident_bytes()
        migrator.peaks.clear()
        report = migrator.migrate(build_plan(old, new))
        held = max(held, resident_bytes())
        size = report.num_bytes // dp_size
        source = 1 if number % 2 else 0
        moves.append(
            Move(
                sent_bytes=size,
                duration_ms=report.duration_ms,
                phase_ms=report.phase_ms,
                raw_ms=raw(size, source, into_new_memory=True),
                raw_used_ms=raw(size, source, into_new_memory=False),
                gathered_ms=gathered(size - weight_bytes, weight_bytes, source),
                held_bytes=held,
                peak_bytes=dict(migrator.peaks),
            )
        )
    migrator.migrate(build_plan(there, here))
    return {
        "layer_bytes": max(run.stage.static_bytes()[0].values()),
        "moves": moves[1:],  # the first one warms up allocators and links
        "digests_equal": run.digests() == before,
    }


def _watched_migrator(run: Any) -> Any:
    """A migrator that notes the largest resident memory of each phase."""
    from megatron_dynmo.consensus import Consensus
    from megatron_dynmo.migrator import Migrator
    from megatron_dynmo.transport import Transport

    class Watched(Migrator):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.peaks: dict[str, int] = {}

        def _run(self, plan: Any, phase: str, *args: Any) -> str:
            forget_peak()
            failures = super()._run(plan, phase, *args)
            self.peaks[phase] = peak_resident_bytes()
            return failures

    topology = run.topology
    transport = Transport(topology.pp_group, topology.pp_global_ranks, run.device)
    return Watched(topology.pp_rank, run.stage, transport, Consensus(run.device))


def _raw_message(run: Any) -> Any:
    """A function that sends so many bytes as one tensor and says how long the slowest rank took."""
    import torch
    import torch.distributed as dist

    from megatron_dynmo.consensus import Consensus

    topology, consensus = run.topology, Consensus(run.device)
    buffer = torch.zeros(0, dtype=torch.uint8)

    def send(size: int, source: int, *, into_new_memory: bool) -> float:
        nonlocal buffer
        if buffer.numel() < size:
            buffer = torch.ones(size, dtype=torch.uint8)
        peer = topology.pp_global_ranks[1 - topology.pp_rank]
        is_source = topology.pp_rank == source
        dist.barrier()
        started = time.perf_counter()
        if is_source:
            dist.isend(buffer[:size], peer, group=topology.pp_group).wait()
        else:
            into = torch.empty(size, dtype=torch.uint8) if into_new_memory else buffer[:size]
            dist.irecv(into, peer, group=topology.pp_group).wait()
        return consensus.slowest((time.perf_counter() - started) * 1e3)

    return send


def _gathered_message(run: Any) -> Any:
    """A function that gathers shards, sends them whole with the weights, and says how long it took.

    What a move would do that did not send shards from rank to rank: the comparison to be had.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_dynmo.consensus import Consensus

    topology, consensus = run.topology, Consensus(run.device)
    replicas = parallel_state.get_data_parallel_group()

    def send(shard_bytes: int, weight_bytes: int, source: int) -> float | None:
        count = dist.get_world_size(replicas)
        if count == 1:
            return None
        shard = torch.ones(shard_bytes, dtype=torch.uint8)
        peer = topology.pp_global_ranks[1 - topology.pp_rank]
        dist.barrier()
        started = time.perf_counter()
        whole = torch.empty(count * shard_bytes + weight_bytes, dtype=torch.uint8)
        if topology.pp_rank == source:
            state = whole[: count * shard_bytes]
            dist.all_gather(list(state.chunk(count)), shard, group=replicas)
            dist.isend(whole, peer, group=topology.pp_group).wait()
        else:
            dist.irecv(whole, peer, group=topology.pp_group).wait()
        return consensus.slowest((time.perf_counter() - started) * 1e3)

    return send


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most memory that was in RAM since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Let the peak begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    (found,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) * 1024

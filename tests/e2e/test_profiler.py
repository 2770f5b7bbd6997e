"""The profiler on real Megatron: layers that spend known virtual time are read back exactly."""

import dataclasses
import time

import pytest

from tests.e2e.training import train
from tests.ranks import run_ranks

COSTS = {1: (10.0, 21.0), 2: (40.0, 90.0), 3: (5.0, 11.0), 4: (7.0, 13.0)}
EMBEDDING, OUTPUT = (3.0, 5.0), (17.0, 19.0)
NUM_MICROBATCHES = 4  # as TINY_GPT has it
PP2 = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout")


def spending(clock, forward_ms, backward_ms):
    """Return a forward hook that makes a module spend time in forward and in backward."""
    import torch

    class Spend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            clock.advance(forward_ms)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            clock.advance(backward_ms)
            return grad

    def hook(module, args, output):
        if isinstance(output, tuple):
            return Spend.apply(output[0]), *output[1:]
        return Spend.apply(output)

    return hook


class Sleeper:
    """Stands for a clock that real time spends."""

    def advance(self, duration_ms):
        time.sleep(duration_ms / 1e3)


def make_slow(chunk, clock, costs):
    """Give the layers and edges of a Megatron chunk their known costs."""
    if not costs:
        return
    for layer in chunk.layers:
        if layer.layer_number in costs:
            layer.mlp.register_forward_hook(spending(clock, *costs[layer.layer_number]))
    for name, cost in (("embedding", EMBEDDING), ("output_layer", OUTPUT)):
        if (module := getattr(chunk.core, name, None)) is not None:
            module.register_forward_hook(spending(clock, *cost))


def profile(rank, world_size, costs, is_virtual, *argv):
    """Train with the profiler under the real patches of the schedules.

    Returns:
        `reports`, one dict an iteration, merged over the ranks, and what `train` returns.
    """
    import torch
    import torch.distributed as dist
    from megatron.training import training

    from megatron_dynmo.adapters.model import chunks_of
    from megatron_dynmo.adapters.topology import Topology
    from megatron_dynmo.clock import VirtualClock, WallClock
    from megatron_dynmo.patches import schedules
    from megatron_dynmo.patching import patched
    from megatron_dynmo.profile_report import ProfileShape, costs_vector, from_vector
    from megatron_dynmo.profiler import ChunkModules, LayerProfiler

    clock = VirtualClock() if is_virtual else WallClock()
    profiler = LayerProfiler(clock, memory_interval=2)
    schedules.controller = lambda: profiler
    train_step = training.train_step
    shape, reports = None, []

    def join(model):
        nonlocal shape
        place = Topology.of_this_rank()
        shape = ProfileShape(len(COSTS), place.pp_size, place.virtual_stages)
        chunks = chunks_of(model)
        for chunk in chunks:
            make_slow(chunk, clock if is_virtual else Sleeper(), costs)
        profiler.attach(
            [
                ChunkModules(
                    chunk.vp_stage,
                    tuple((layer.layer_number, layer) for layer in chunk.layers),
                    getattr(chunk.core, "embedding", None),
                    getattr(chunk.core, "output_layer", None),
                )
                for chunk in chunks
            ]
        )

    def profiled_step(*args, **kwargs):
        if shape is None:
            join(args[2])
        profiler.begin_iteration()
        result = train_step(*args, **kwargs)
        sample = profiler.end_iteration()
        vector = costs_vector(sample, shape, Topology.of_this_rank().pp_rank)
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        reports.append(dataclasses.asdict(from_vector(vector, shape)))
        return result

    training.train_step = profiled_step
    torch.manual_seed(0)
    with patched(schedules.specs()):
        return {"reports": reports, **train(rank, world_size, *argv)}


def layer_times(report):
    return {
        layer["layer_number"]: (layer["forward_ms"], layer["backward_ms"])
        for layer in report["costs"]["layers"]
    }


def with_recompute(costs):
    return {number: (forward, forward + backward) for number, (forward, backward) in costs.items()}


FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")


RUNS = {
    "1f1b": ("Ett|ttL", COSTS, ()),
    "empty stage": ("E|ttttL", COSTS, ("--untie-embeddings-and-output-weights",)),
    "interleaved": ("Et|t|t|tL", COSTS, ()),
    "full": ("Ett|ttL", with_recompute(COSTS), (*FULL, "--recompute-num-layers", "2")),
    "core_attn": ("Ett|ttL", COSTS, (*SELECTIVE, "core_attn")),
    # Stock Megatron 0.19.2 recurses without end when a recomputed MLP returns a bias.
    "mlp": ("Ett|ttL", with_recompute(COSTS), (*SELECTIVE, "mlp", "--disable-bias-linear")),
}
IN_CI = ("1f1b", "interleaved")


@pytest.mark.parametrize(
    ("layout", "expected", "flags"),
    [pytest.param(*RUNS[r], id=r, marks=[pytest.mark.matrix] * (r not in IN_CI)) for r in RUNS],
)
def test_reads_back_what_layers_and_edges_spend(layout, expected, flags):
    results = run_ranks(profile, 2, COSTS, True, *PP2, layout, "--train-iters", "2", *flags)
    assert results[0]["reports"] == results[1]["reports"]
    assert len(results[0]["reports"]) == 2
    for report in results[0]["reports"]:
        costs = report["costs"]
        assert layer_times(report) == expected
        first, last = costs["first_stage_extra"], costs["last_stage_extra"]
        assert (first["forward_ms"], first["backward_ms"]) == EMBEDDING
        assert (last["forward_ms"], last["backward_ms"]) == OUTPUT
        assert costs["num_microbatches"] == NUM_MICROBATCHES
        busy = sum(stage["busy_ms"] for stage in report["stages"])
        per_microbatch = sum(map(sum, expected.values())) + sum(EMBEDDING) + sum(OUTPUT)
        assert busy == NUM_MICROBATCHES * per_microbatch
        assert last["activation_bytes"] > 0


@pytest.mark.matrix
def test_sees_a_slow_layer_in_real_time():
    slow = {2: (20.0, 50.0)}
    results = run_ranks(profile, 2, slow, False, *PP2, "Ett|ttL")
    times = layer_times(results[0]["reports"][-1])
    forward, backward = times.pop(2)
    assert forward >= 20.0 and backward >= 50.0  # a sleep is never shorter
    assert forward > 2 * max(other for other, _ in times.values())
    assert backward > 2 * max(other for _, other in times.values())
    busy = [stage["busy_ms"] for stage in results[0]["reports"][-1]["stages"]]
    assert results[0]["reports"][-1]["iteration_ms"] >= busy[0] >= NUM_MICROBATCHES * 70.0


@pytest.mark.matrix
def test_observing_changes_no_bit_of_training():
    argv = (*PP2, "Et|tttL")
    plain = run_ranks(train, 2, *argv)
    observed = run_ranks(profile, 2, {}, True, *argv)
    assert plain[-1]["losses"][-1]
    for one, other in zip(plain, observed, strict=True):
        for what in ("losses", "grad_norms", "parameters", "moments"):
            assert one[what] and one[what] == other[what], what
    memory = {layer["activation_bytes"] for layer in observed[0]["reports"][-1]["costs"]["layers"]}
    assert len(memory) == 1 and memory.pop() > 0  # equal layers keep equal amounts

"""The profiler against plain modules that spend known amounts of virtual time."""

import copy
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_dynmo.clock import VirtualClock, WallClock
from megatron_dynmo.profile_sample import Timing
from megatron_dynmo.profiler import ChunkModules, LayerProfiler


class Spend(torch.autograd.Function):
    """Spends virtual time in forward and in backward; the identity otherwise."""

    @staticmethod
    def forward(ctx, x, clock, forward_ms, backward_ms):
        ctx.clock, ctx.backward_ms = clock, backward_ms
        clock.advance(forward_ms)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.advance(ctx.backward_ms)
        return grad, None, None, None


class Layer(torch.nn.Module):
    """A layer with Megatron's calling convention and known costs."""

    def __init__(self, clock, forward_ms, backward_ms):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.clock, self.forward_ms, self.backward_ms = clock, forward_ms, backward_ms

    def forward(self, hidden_states, attention_mask=None):
        inner = self.linear(hidden_states)
        spent = Spend.apply(inner, self.clock, self.forward_ms, self.backward_ms)
        return hidden_states + spent, None


class Edge(torch.nn.Module):
    """An embedding or an output layer."""

    def __init__(self, clock, forward_ms, backward_ms):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 0.5))
        self.clock, self.forward_ms, self.backward_ms = clock, forward_ms, backward_ms

    def forward(self, x):
        return Spend.apply(x * self.weight, self.clock, self.forward_ms, self.backward_ms)


COSTS = {1: (10.0, 20.0), 2: (1.0, 2.0), 3: (4.0, 9.0)}


class Chunk:
    """A model chunk: forward and backward of one micro-batch, as a schedule would call them."""

    def __init__(self, clock, costs, embedding=None, output=None, vp_stage=0, recompute=0):
        self.vp_stage, self.recompute = vp_stage, recompute
        self.layers = {n: Layer(clock, *cost) for n, cost in costs.items()}
        self.embedding = Edge(clock, *embedding) if embedding else None
        self.output = Edge(clock, *output) if output else None

    def modules(self):
        return ChunkModules(self.vp_stage, tuple(self.layers.items()), self.embedding, self.output)

    def run_layers(self, numbers, hidden):
        for i, number in enumerate(numbers):
            # Both ways of passing the hidden states are in use.
            layer = self.layers[number]
            hidden, _ = layer(hidden) if i % 2 else layer(hidden_states=hidden)
        return hidden

    def forward(self, x):
        hidden = self.embedding(x) if self.embedding else x
        numbers = list(self.layers)
        if self.recompute:
            for i in range(0, len(numbers), self.recompute):
                group = numbers[i : i + self.recompute]
                hidden = checkpoint(self.run_layers, group, hidden, use_reentrant=True)
        else:
            hidden = self.run_layers(numbers, hidden)
        if self.output:
            return self.output(hidden).sum()
        return hidden if numbers else hidden.clone()


class Pipeline:
    """Drives one rank's chunks in any order of F and B, the chunks being independent."""

    def __init__(self, profiler, *chunks):
        self.profiler = profiler
        self.chunks = {chunk.vp_stage: chunk for chunk in chunks}
        self.in_flight = {chunk.vp_stage: [] for chunk in chunks}
        profiler.attach([chunk.modules() for chunk in chunks])

    def forward(self, vp_stage=0, requires_grad=True):
        x = torch.ones(2, 4, requires_grad=requires_grad)
        with self.profiler.forward_step(vp_stage) as produced:
            output = self.chunks[vp_stage].forward(x)
            produced([output])
        self.in_flight[vp_stage].append(output)

    def backward(self, vp_stage=0):
        output = self.in_flight[vp_stage].pop(0)
        with self.profiler.backward_step([output]):
            if output.requires_grad:
                torch.autograd.backward(output, torch.ones_like(output))


@pytest.fixture
def clock():
    return VirtualClock()


def read(sample):
    return {
        layer.layer_number: (layer.forward.median_ms, layer.backward.median_ms)
        for layer in sample.layers
    }


def run_1f1b(pipeline, num_microbatches=4, num_warmup=2):
    pipeline.profiler.begin_iteration()
    for _ in range(num_warmup):
        pipeline.forward()
    for _ in range(num_microbatches - num_warmup):
        pipeline.forward()
        pipeline.backward()
    for _ in range(num_warmup):
        pipeline.backward()
    return pipeline.profiler.end_iteration()


def test_reads_layer_times_back_with_microbatches_in_flight(clock):
    sample = run_1f1b(Pipeline(LayerProfiler(clock), Chunk(clock, COSTS)))
    assert read(sample) == COSTS
    assert sample.num_microbatches == 4
    assert sample.layers[0].forward == Timing(10.0, 10.0)
    assert sample.busy_ms == 4 * (15.0 + 31.0) == sample.forward_backward_ms
    assert sample.idle_ms == 0.0
    assert sample.first_extra is None and sample.last_extra is None


def test_second_iteration_does_not_see_the_first(clock):
    pipeline = Pipeline(LayerProfiler(clock), Chunk(clock, COSTS))
    run_1f1b(pipeline)
    pipeline.chunks[0].layers[2].forward_ms = 50.0
    assert read(run_1f1b(pipeline)) == {**COSTS, 2: (50.0, 2.0)}


@pytest.mark.parametrize("group", [1, 2, 3])
def test_full_recompute_counts_the_second_forward_as_backward(clock, group):
    sample = run_1f1b(Pipeline(LayerProfiler(clock), Chunk(clock, COSTS, recompute=group)))
    assert read(sample) == {n: (f, f + b) for n, (f, b) in COSTS.items()}
    assert sample.busy_ms == 4 * (15.0 + 15.0 + 31.0)


def test_recompute_under_an_embedding_leaves_the_extra_alone(clock):
    chunk = Chunk(clock, COSTS, embedding=(3.0, 5.0), recompute=2)
    sample = run_1f1b(Pipeline(LayerProfiler(clock), chunk))
    assert read(sample) == {n: (f, f + b) for n, (f, b) in COSTS.items()}
    assert sample.first_extra.forward.mean_ms == 3.0
    assert sample.first_extra.backward.mean_ms == 5.0


def test_virtual_stages_are_told_apart(clock):
    first = Chunk(clock, {1: (10.0, 20.0)}, embedding=(3.0, 5.0), vp_stage=0)
    second = Chunk(clock, {5: (1.0, 2.0), 6: (4.0, 9.0)}, output=(7.0, 8.0), vp_stage=1)
    pipeline = Pipeline(LayerProfiler(clock), first, second)
    pipeline.profiler.begin_iteration()
    for vp_stage in (0, 0, 1, 1):
        pipeline.forward(vp_stage)
    for vp_stage in (1, 0, 1, 0):
        pipeline.backward(vp_stage)
    sample = pipeline.profiler.end_iteration()
    assert read(sample) == {1: (10.0, 20.0), 5: (1.0, 2.0), 6: (4.0, 9.0)}
    assert [chunk.vp_stage for chunk in sample.chunks] == [0, 1]
    assert [chunk.busy_ms for chunk in sample.chunks] == [2 * 38.0, 2 * 31.0]
    assert [chunk.forward.mean_ms for chunk in sample.chunks] == [13.0, 12.0]
    assert [chunk.backward.mean_ms for chunk in sample.chunks] == [25.0, 19.0]
    assert (sample.first_extra.forward.mean_ms, sample.first_extra.backward.mean_ms) == (3.0, 5.0)
    assert (sample.last_extra.forward.mean_ms, sample.last_extra.backward.mean_ms) == (7.0, 8.0)


@pytest.mark.parametrize("recompute", [0, 2])
def test_single_stage_divides_its_extra_between_embedding_and_output(clock, recompute):
    chunk = Chunk(clock, COSTS, embedding=(3.0, 5.0), output=(7.0, 8.0), recompute=recompute)
    sample = run_1f1b(Pipeline(LayerProfiler(clock), chunk))
    assert (sample.first_extra.forward.mean_ms, sample.first_extra.backward.mean_ms) == (3.0, 5.0)
    assert (sample.last_extra.forward.mean_ms, sample.last_extra.backward.mean_ms) == (7.0, 8.0)


def test_frozen_prefix_has_no_backward_and_the_first_live_layer_ends_with_the_step(clock):
    chunk = Chunk(clock, COSTS, embedding=(3.0, 5.0))
    for module in (chunk.embedding, chunk.layers[1]):
        module.requires_grad_(False)
    pipeline = Pipeline(LayerProfiler(clock), chunk)
    pipeline.profiler.begin_iteration()
    for _ in range(3):
        pipeline.forward(requires_grad=False)
    for _ in range(3):
        pipeline.backward()
    sample = pipeline.profiler.end_iteration()
    assert read(sample) == {**COSTS, 1: (10.0, 0.0)}
    assert sample.first_extra.backward.mean_ms == 0.0


def test_wholly_frozen_chunk_still_counts_its_steps(clock):
    chunk = Chunk(clock, {1: (10.0, 20.0)})
    chunk.layers[1].requires_grad_(False)
    pipeline = Pipeline(LayerProfiler(clock), chunk)
    pipeline.profiler.begin_iteration()
    pipeline.forward(requires_grad=False)
    pipeline.backward()
    sample = pipeline.profiler.end_iteration()
    assert read(sample) == {1: (10.0, 0.0)}
    assert sample.num_microbatches == 1 and sample.busy_ms == 10.0


def test_gradient_cut_between_layers_ends_the_upper_one_where_the_lower_starts(clock):
    chunk = Chunk(clock, COSTS)
    uncut = chunk.layers[3].forward
    aside = []

    def cut(hidden_states, attention_mask=None):
        aside.append(hidden_states)
        return uncut(hidden_states.detach())

    chunk.layers[3].forward = cut
    pipeline = Pipeline(LayerProfiler(clock), chunk)
    pipeline.profiler.begin_iteration()
    pipeline.forward()
    # An early-exit head: the loss reaches the lower layers by another way.
    pipeline.in_flight[0][0] = _tagged(pipeline.in_flight[0][0], aside[0])
    pipeline.backward()
    assert read(pipeline.profiler.end_iteration()) == COSTS


def _tagged(output, other):
    joined = output + other
    joined._dynmo_vp_stage = output._dynmo_vp_stage
    return joined


def test_layer_that_passes_its_input_through_costs_its_neighbour_nothing(clock):
    chunk = Chunk(clock, COSTS)
    chunk.layers[2].forward = lambda hidden_states, attention_mask=None: (hidden_states, None)
    sample = run_1f1b(Pipeline(LayerProfiler(clock), chunk))
    assert read(sample) == {**COSTS, 2: (0.0, 0.0)}


def test_chunk_without_layers_has_only_extra(clock):
    sample = run_1f1b(Pipeline(LayerProfiler(clock), Chunk(clock, {}, embedding=(3.0, 5.0))))
    assert sample.layers == ()
    assert (sample.first_extra.forward.mean_ms, sample.first_extra.backward.mean_ms) == (3.0, 5.0)
    assert sample.num_microbatches == 4


def test_waiting_is_idle_time_of_the_chunk_that_waited(clock):
    first = Chunk(clock, {1: (10.0, 20.0)}, vp_stage=0)
    second = Chunk(clock, {2: (1.0, 2.0)}, vp_stage=1)
    pipeline = Pipeline(LayerProfiler(clock), first, second)
    profiler = pipeline.profiler
    profiler.begin_iteration()
    clock.advance(1000.0)  # zeroing gradients is no bubble
    profiler.begin_forward_backward()
    clock.advance(6.0)
    pipeline.forward(0)
    clock.advance(2.5)
    pipeline.forward(1)
    pipeline.backward(1)
    clock.advance(0.5)
    pipeline.backward(0)
    clock.advance(40.0)  # the optimizer
    sample = profiler.end_iteration()
    assert [chunk.idle_ms for chunk in sample.chunks] == [6.5, 2.5]
    assert sample.forward_backward_ms == sample.busy_ms + sample.idle_ms == 42.0
    assert sample.iteration_ms == 1082.0
    assert sample.tail_ms == 1040.0


def test_median_ignores_a_hiccup_and_mean_adds_up(clock):
    pipeline = Pipeline(LayerProfiler(clock), Chunk(clock, {1: (10.0, 20.0)}))
    pipeline.profiler.begin_iteration()
    for forward_ms in (10.0, 100.0, 10.0):
        pipeline.chunks[0].layers[1].forward_ms = forward_ms
        pipeline.forward()
    for _ in range(3):
        pipeline.backward()
    layer = pipeline.profiler.end_iteration().layers[0]
    assert layer.forward == Timing(mean_ms=40.0, median_ms=10.0)
    assert layer.backward == Timing(mean_ms=20.0, median_ms=20.0)


def test_evaluation_passes_by_unrecorded(clock):
    pipeline = Pipeline(LayerProfiler(clock), Chunk(clock, COSTS))
    before = run_1f1b(pipeline)
    with torch.no_grad():
        pipeline.forward()
    pipeline.in_flight[0].clear()
    assert read(run_1f1b(pipeline)) == read(before)


def test_attach_after_a_move_watches_the_new_layers_only(clock):
    profiler = LayerProfiler(clock)
    chunk = Chunk(clock, COSTS)
    pipeline = Pipeline(profiler, chunk)
    run_1f1b(pipeline)
    gone = chunk.layers.pop(3)
    chunk.layers[4] = Layer(clock, 6.0, 7.0)
    profiler.attach([chunk.modules()])
    assert not gone._forward_hooks and not gone._forward_pre_hooks
    assert read(run_1f1b(pipeline)) == {1: COSTS[1], 2: COSTS[2], 4: (6.0, 7.0)}
    profiler.detach()
    for layer in chunk.layers.values():
        assert not layer._forward_hooks and not layer._forward_pre_hooks


def test_aborted_iteration_leaves_nothing_behind(clock):
    profiler = LayerProfiler(clock)
    pipeline = Pipeline(profiler, Chunk(clock, COSTS))
    profiler.begin_iteration()
    with pytest.raises(RuntimeError, match="boom"), profiler.forward_step(0):
        raise RuntimeError("boom")
    assert read(run_1f1b(pipeline)) == COSTS


def _train(profiler, num_iterations=4):
    torch.manual_seed(3)
    clock = VirtualClock()
    chunk = Chunk(clock, COSTS, embedding=(1.0, 1.0), output=(1.0, 1.0))
    modules = torch.nn.ModuleList(chunk.modules().modules())
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-2)
    losses = []
    if profiler:
        profiler.attach([chunk.modules()])
    for _ in range(num_iterations):
        if profiler:
            profiler.begin_iteration()
        for _ in range(3):
            x = torch.randn(2, 4)
            if not profiler:
                loss = chunk.forward(x)
                loss.backward()
            else:
                with profiler.forward_step() as produced:
                    loss = chunk.forward(x)
                    produced(loss)
                with profiler.backward_step(loss):
                    loss.backward()
            losses.append(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
        if profiler:
            profiler.end_iteration()
    return losses, copy.deepcopy(modules.state_dict()), optimizer.state_dict()["state"]


def test_observing_changes_no_bit():
    plain = _train(None)
    observed = _train(LayerProfiler(WallClock(), memory_interval=1))
    assert observed[0] == plain[0]
    for name, value in plain[1].items():
        assert torch.equal(observed[1][name], value), name
    for number, state in plain[2].items():
        for key, value in state.items():
            assert torch.equal(observed[2][number][key], value), (number, key)


def test_no_graph_outlives_its_microbatch():
    clock = VirtualClock()
    profiler = LayerProfiler(clock, memory_interval=1)
    pipeline = Pipeline(profiler, Chunk(clock, COSTS))
    profiler.begin_iteration()
    pipeline.forward()
    ghost = weakref.ref(pipeline.in_flight[0][0])
    pipeline.backward()
    gc.disable()
    try:
        assert ghost() is None
    finally:
        gc.enable()
    profiler.end_iteration()


def test_memory_is_measured_rarely(monkeypatch):
    from megatron_dynmo import profiler as module

    made = []
    make = module.make_meter
    monkeypatch.setattr(module, "make_meter", lambda *a: made.append(1) or make(*a))
    clock = VirtualClock()
    pipeline = Pipeline(LayerProfiler(clock, memory_interval=3), Chunk(clock, COSTS))
    samples = [run_1f1b(pipeline) for _ in range(7)]
    assert len(made) == 3  # iterations 1, 4 and 7; one micro-batch each
    assert len({s.layers[0].activation_bytes for s in samples}) == 1

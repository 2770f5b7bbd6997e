import random

import pytest
import torch

from megatron_dynmo.cost import ExtraCost, LayerCost
from megatron_dynmo.errors import ConservationError
from megatron_dynmo.profile_report import ProfileShape, costs_vector, from_vector
from megatron_dynmo.profile_sample import (
    ChunkSample,
    ExtraSample,
    LayerSample,
    StageSample,
    Timing,
)


def both(ms):
    return Timing(mean_ms=ms + 0.25, median_ms=ms)


def layer(number, forward=1.0, backward=2.0):
    return LayerSample(number, both(forward), both(backward), 1000 + number, 10 + number)


def chunk(vp_stage, busy=30.0, idle=5.0):
    return ChunkSample(vp_stage, both(3.0), both(6.0), busy, idle, num_microbatches=4)


def stage(layers, chunks, first=None, last=None, iteration_ms=100.0, forward_backward_ms=60.0):
    return StageSample(
        tuple(layers), tuple(chunks), first, last, iteration_ms, forward_backward_ms, 7 << 30
    )


EDGE = ExtraSample(both(0.5), both(0.75), 512, 64)
SHAPE = ProfileShape(num_layers=3, num_stages=2)
SAMPLES = [
    stage([layer(1), layer(2, 1.5)], [chunk(0, 40.0, 20.0)], first=EDGE),
    stage([layer(3, 4.0, 9.0)], [chunk(0, 50.0, 2.0)], last=EDGE, forward_backward_ms=52.0),
]


def merge(samples, shape=SHAPE, pp_ranks=None, **kwargs):
    pp_ranks = pp_ranks or range(len(samples))
    vectors = [costs_vector(s, shape, p, **kwargs) for s, p in zip(samples, pp_ranks, strict=True)]
    return torch.stack(vectors).amax(0)


def test_round_trip():
    report = from_vector(merge(SAMPLES), SHAPE)
    assert report.costs.layers == (
        LayerCost(1, 1.0, 2.0, 1001, 11),
        LayerCost(2, 1.5, 2.0, 1002, 12),
        LayerCost(3, 4.0, 9.0, 1003, 13),
    )
    assert report.costs.first_stage_extra == ExtraCost(0.5, 0.75, 512, 64)
    assert report.costs.last_stage_extra == ExtraCost(0.5, 0.75, 512, 64)
    assert report.costs.num_microbatches == 4
    assert [(s.pp_rank, s.vp_stage, s.busy_ms, s.idle_ms) for s in report.stages] == [
        (0, 0, 40.0, 20.0),
        (1, 0, 50.0, 10.0),
    ]
    assert (report.stages[0].forward_ms, report.stages[0].backward_ms) == (3.0, 6.0)
    assert report.imbalance == pytest.approx(50.0 / 45.0 - 1.0)
    assert report.bubble_fraction == pytest.approx(30.0 / 120.0)
    assert (report.iteration_ms, report.forward_backward_ms, report.tail_ms) == (100.0, 60.0, 40.0)
    assert report.peak_memory_bytes == (7 << 30, 7 << 30)
    assert report.rank_busy_ms == (40.0, 50.0)


def test_mean_can_be_asked_for():
    report = from_vector(merge(SAMPLES, use_median=False), SHAPE)
    assert report.costs.layers[0].forward_ms == 1.25


def test_any_order_of_merging_gives_the_same_bits():
    generator = random.Random(5)
    shape = ProfileShape(num_layers=6, num_stages=3)
    vectors = []
    for pp_rank in range(3):
        for _ in range(2):  # data-parallel twins that measured slightly different times
            layers = [layer(2 * pp_rank + i, generator.random()) for i in (1, 2)]
            sample = stage(layers, [chunk(0, generator.random())])
            vectors.append(costs_vector(sample, shape, pp_rank))
    reference = torch.stack(vectors).amax(0)
    for _ in range(10):
        generator.shuffle(vectors)
        left = vectors[0]
        for right in vectors[1:]:
            left = torch.maximum(left, right)
        assert torch.equal(left, reference)


def test_tensor_parallel_peers_merge_to_the_one_that_did_not_wait():
    waited, computed = (
        costs_vector(stage([layer(1, ms)], [chunk(0)]), ProfileShape(1, 1), 0) for ms in (9.0, 4.0)
    )
    report = from_vector(torch.minimum(waited, computed), ProfileShape(1, 1))
    assert report.costs.layers[0].forward_ms == 4.0


def test_virtual_stages_share_their_ranks_idle_time():
    shape = ProfileShape(num_layers=4, num_stages=2, virtual_stages=2)
    samples = [
        stage([layer(1), layer(3)], [chunk(0, 20.0, 9.0), chunk(1, 10.0, 3.0)], first=EDGE),
        stage([layer(2), layer(4)], [chunk(0, 25.0, 0.0), chunk(1, 35.0, 0.0)], last=EDGE),
    ]
    report = from_vector(merge(samples, shape), shape)
    assert [(s.pp_rank, s.vp_stage) for s in report.stages] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [s.idle_ms for s in report.stages] == [22.5, 7.5, 0.0, 0.0]
    for pp_rank in range(2):
        total = report.rank_busy_ms[pp_rank] + report.rank_idle_ms[pp_rank]
        assert total == report.forward_backward_ms


def test_a_copy_of_the_embedding_on_a_later_stage_is_no_first_stage_extra():
    heavy = ExtraSample(both(99.0), both(99.0))
    copy = stage([layer(3)], [chunk(0)], first=heavy, last=EDGE)
    report = from_vector(merge([SAMPLES[0], copy]), SHAPE)
    assert report.costs.first_stage_extra.forward_ms == 0.5


def test_parked_rank_contributes_nothing():
    report = from_vector(merge([*SAMPLES, None], pp_ranks=[0, 1, 0]), SHAPE)
    assert report == from_vector(merge(SAMPLES), SHAPE)


def test_layer_that_nobody_owns_is_named():
    samples = [stage([layer(1)], [chunk(0)]), SAMPLES[1]]
    with pytest.raises(ConservationError, match=r"layers \[2\] were measured by no rank"):
        from_vector(merge(samples), SHAPE)


def test_stage_that_nobody_measured_is_named():
    whole = stage([layer(1), layer(2), layer(3)], [chunk(0)])
    with pytest.raises(ConservationError, match=r"\[\[1, 0\]\]"):
        from_vector(merge([whole]), SHAPE)


def test_idle_time_stays_consistent_when_data_parallel_twins_differ():
    twins = [
        stage([layer(n) for n in (1, 2, 3)], [chunk(0, busy, idle)])
        for busy, idle in ((40.0, 20.0), (55.0, 5.0))
    ]
    report = from_vector(merge(twins, ProfileShape(3, 1), pp_ranks=[0, 0]), ProfileShape(3, 1))
    assert (report.stages[0].busy_ms, report.stages[0].idle_ms) == (55.0, 5.0)

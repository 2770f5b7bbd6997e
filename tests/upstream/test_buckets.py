"""One bucket a layer: where a layer's parameters lie and who owns which part is its own affair."""

import itertools

import pytest
import torch
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.distributed.param_and_grad_buffer import _compute_default_per_buffer_param_layout
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import PerBufferParamLayout

from megatron_dynmo.adapters.wrapper import LAYER_TAG, bucket_per_layer, tag_layer

SIZES = ((3, 5), (7,), (64, 2), (1,))


def make_layer(number: int) -> torch.nn.Module:
    """A layer whose size is its own."""
    layer = torch.nn.Module()
    for index, shape in enumerate((*SIZES, (number,))):
        layer.register_parameter(f"w{index}", torch.nn.Parameter(torch.zeros(shape)))
    tag_layer(layer)
    return layer


def sharded(data_parallel: int):
    planner = bucket_per_layer(DistributedOptimizer._compute_per_buffer_param_layout)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return lambda params: planner(params, 40_000_000, data_parallel, config)


def unsharded(params: list[torch.nn.Parameter]) -> PerBufferParamLayout:
    return bucket_per_layer(_compute_default_per_buffer_param_layout)(params, 10)


PLANNERS = {
    "unsharded": (unsharded, 1),
    **{f"sharded over {n}": (sharded(n), n) for n in (1, 2, 3, 8)},
}


def stage(layers: list[torch.nn.Module], *, first: bool, last: bool) -> list[torch.nn.Parameter]:
    """Parameters of a stage in forward order, with embedding and output where they belong."""
    ends = [torch.nn.Parameter(torch.zeros(n)) for n in (130, 33)] if first else []
    norm = [torch.nn.Parameter(torch.zeros(9)), torch.nn.Parameter(torch.zeros(130))]
    return [*ends, *itertools.chain(*(la.parameters() for la in layers)), *(norm if last else ())]


def places(layout: PerBufferParamLayout, layer: torch.nn.Module, ranks: int) -> list[object]:
    """Where a layer lies in its bucket, and which part of each parameter each rank owns."""
    buckets = {layout.param_index_map[p][2] for p in layer.parameters()}
    (bucket,) = buckets
    start, end = layout.bucket_indices[bucket]
    assert (end - start) % ranks == 0
    share = (end - start) // ranks
    found: list[object] = [end - start, layout.per_bucket_numel_unpadded[bucket]]
    for param in layer.parameters():
        low, high, _ = layout.param_index_map[param]
        found.append((low - start, high - start))
        for rank in range(ranks):
            mine = (start + rank * share, start + (rank + 1) * share)
            found.append((max(low, mine[0]) - low, min(high, mine[1]) - low))
    return found


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_layer_lies_the_same_whatever_its_neighbours(planner):
    plan, ranks = PLANNERS[planner]
    layers = [make_layer(number) for number in (1, 50, 3, 200)]
    seen: dict[int, list[list[object]]] = {0: [], 1: [], 2: [], 3: []}
    for count in range(1, 5):
        for begin in range(5 - count):
            held = list(range(begin, begin + count))
            for first, last in itertools.product((False, True), repeat=2):
                layout = plan(stage([layers[i] for i in held], first=first, last=last))
                for i in held:
                    seen[i].append(places(layout, layers[i], ranks))
    for found in seen.values():
        assert len(found) > 10 and all(one == found[0] for one in found)


@pytest.mark.parametrize("planner", PLANNERS)
def test_buckets_cover_the_buffer_and_hold_one_layer_each(planner):
    plan, _ = PLANNERS[planner]
    layers = [make_layer(number) for number in (1, 50, 3)]
    params = stage(layers, first=True, last=True)
    layout = plan(params)
    assert set(layout.param_index_map) == set(params)
    assert list(layout.param_index_map) == params[::-1]
    ends = [0, *(end for _, end in layout.bucket_indices)]
    assert [start for start, _ in layout.bucket_indices] == ends[:-1]
    assert len(layout.per_bucket_numel_unpadded) == len(layout.bucket_indices) == 5
    tags: dict[int, set[object]] = {}
    for param, (low, high, bucket) in layout.param_index_map.items():
        assert high - low == param.numel()
        start, end = layout.bucket_indices[bucket]
        assert start <= low and high <= end
        tags.setdefault(bucket, set()).add(getattr(param, LAYER_TAG, None))
    assert all(len(held) == 1 for held in tags.values())
    spans = sorted((low, high) for low, high, _ in layout.param_index_map.values())
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def test_a_tied_embedding_keeps_the_bucket_of_its_own_that_megatron_gives_it():
    params = stage([make_layer(2)], first=True, last=False)
    params[0].shared_embedding = True
    layout = sharded(2)(params)
    buckets = [layout.param_index_map[param][2] for param in params[:2]]
    assert len(set(buckets)) == 2
    assert len(layout.bucket_indices) == 3


def test_a_stage_without_parameters():
    for plan, _ in PLANNERS.values():
        layout = plan([])
        assert layout.param_index_map == {} and layout.bucket_indices == []


def test_the_tag_survives_a_cast_and_belongs_to_one_layer():
    one, other = make_layer(1), make_layer(1)
    one.bfloat16()
    tags = {getattr(p, LAYER_TAG) for p in one.parameters()}
    assert len(tags) == 1
    assert tags.isdisjoint(getattr(p, LAYER_TAG) for p in other.parameters())

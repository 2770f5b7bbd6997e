"""Our schedule orders are those that Megatron's scheduler tables give."""

from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron_dynmo.pipeline_schedule import rank_order


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("virtual_stages", [None, 2, 3])
@pytest.mark.parametrize("extra", [0, 1, 4])
def test_warm_up_and_order_are_megatrons(num_stages, virtual_stages, extra):
    num_microbatches = 2 * num_stages + extra * num_stages
    chunks = virtual_stages or 1
    for rank in range(num_stages):
        group = SimpleNamespace(size=lambda: num_stages, rank=lambda r=rank: r)
        communicator = SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=virtual_stages
        )
        total, _, num_warmup, _ = get_pp_rank_microbatches(
            num_microbatches, chunks, num_stages, p2p_communicator=communicator
        )
        order = rank_order(
            "interleaved" if virtual_stages else "1f1b",
            rank,
            num_stages,
            num_microbatches,
            virtual_stages=chunks,
        )
        assert len(order) == 2 * total
        assert [p[0] for p in order].index("backward") == min(num_warmup + 1, total)
        table = get_schedule_table(num_microbatches, chunks, num_stages)
        forwards = [(mb, vp) for direction, vp, mb in order if direction == "forward"]
        backwards = [(mb, chunks - 1 - vp) for direction, vp, mb in order if direction != "forward"]
        if virtual_stages:
            assert forwards == backwards == table
        else:
            assert forwards == backwards == [(mb, 0) for mb in range(num_microbatches)]

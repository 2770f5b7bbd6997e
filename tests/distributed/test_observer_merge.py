"""Times of layers over the ranks that wait for each other in MoE layers, and of dense ones."""

from types import SimpleNamespace

from tests.ranks import run_ranks
from tests.unit.test_profile_report import chunk, layer, stage

# By rank, forward of layer 1, which is dense, and of layer 2, where rank 1 was waited for: it came
# 3 ms late, and the experts of the slower of the two took 5 ms.
MEASURED = ((4.0, 8.0), (7.0, 5.0))


def merged_forwards(rank, world_size, moe_layers):
    """Return the merged forward times and the bytes of both layers."""
    import torch
    from torch.distributed import group

    from megatron_dynmo.clock import make_clock
    from megatron_dynmo.observer import Observer

    topology = SimpleNamespace(
        pp_rank=0, pp_size=1, virtual_stages=1, tp_size=1, tp_group=None,
        token_exchange_size=world_size, token_exchange_group=group.WORLD,
    )  # fmt: skip
    device = torch.device("cpu")
    run = SimpleNamespace(
        topology=topology, num_layers=2, moe_layers=moe_layers, device=device,
        chunk_modules=lambda: [], static_bytes=None,
    )  # fmt: skip
    observer = Observer(run, make_clock(device), window=1)
    layers = [layer(n, forward) for n, forward in enumerate(MEASURED[rank], start=1)]
    observer.add(7, stage(layers, [chunk(0)]))
    ((iteration, report),) = observer.collect()
    assert iteration == 7
    return [(cost.forward_ms, cost.memory_bytes) for cost in report.costs.layers]


def test_waiting_in_moe_layers_is_left_out_and_dense_layers_count_by_the_slowest():
    first, second = run_ranks(merged_forwards, 2, (2,))
    assert first == second == [(7.0, 1001), (5.0, 1002)]


def test_without_moe_layers_the_slowest_rank_counts():
    first, second = run_ranks(merged_forwards, 2, ())
    assert first == second == [(7.0, 1001), (8.0, 1002)]

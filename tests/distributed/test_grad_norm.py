"""The exact gradient norm over real gloo ranks: where tensors live leaves no trace."""

import math

import numpy as np
import pytest

from tests.ranks import run_ranks

NUM_TENSORS = 23

# For each world size, the indices of the tensors on each rank, in their order there.
SPREADS = {
    2: [
        [list(range(23)), []],
        [[], list(range(22, -1, -1))],
        [list(range(0, 23, 2)), list(range(1, 23, 2))],
        [[5, 22, 0], [i for i in range(22, -1, -1) if i not in (5, 22, 0)]],
    ],
    4: [
        [[], list(range(23)), [], []],
        [[i for i in range(23) if i % 4 == rank] for rank in range(4)],
        [[22, 1], list(range(2, 9)), list(range(21, 8, -1)), [0]],
    ],
}


def gradients():
    """Make gradients of many sizes, shapes and magnitudes, some strided, some in bf16."""
    import torch

    generator = torch.Generator().manual_seed(11)
    grads = []
    for i in range(NUM_TENSORS):
        grad = torch.randn(7 + 5 * i, 3 + i, generator=generator) * 10.0 ** (i % 9 - 6)
        if i % 5 == 1:
            grad = grad.t()
        if i % 5 == 2:
            grad = grad.to(torch.bfloat16)
        if i % 5 == 3:
            # A view into a buffer that starts off any alignment, as in a gradient buffer.
            buffer = torch.empty(grad.numel() + i)
            buffer[i:].copy_(grad.reshape(-1))
            grad = buffer[i:].view_as(grad)
        grads.append(grad)
    return grads


def exact_and_plain_norms(rank, world_size, spreads):
    """Return, by spread, the exact norm and upstream's way of adding, as hex."""
    import torch
    import torch.distributed as dist

    from megatron_dynmo.adapters.grad_norm import exact_grad_norm

    def not_to_be_called(*args):
        raise AssertionError("the original is for other norms")

    norm_of = exact_grad_norm(not_to_be_called)
    grads = gradients()
    before = [grad.clone() for grad in grads]
    results = []
    for spread in spreads:
        mine = [grads[i] for i in spread[rank]]
        plain = torch.zeros(1)
        for grad in mine:
            plain += grad.float().square().sum()
        dist.all_reduce(plain)
        results.append((norm_of(mine).hex(), plain.item().hex()))
    assert all(torch.equal(one, other) for one, other in zip(grads, before, strict=True))
    return results


def reference_norm():
    squares = [float(np.linalg.norm(grad.double().numpy().ravel())) ** 2 for grad in gradients()]
    return math.sqrt(math.fsum(squares))


@pytest.fixture(scope="module")
def results():
    return {
        world_size: run_ranks(exact_and_plain_norms, world_size, spreads)
        for world_size, spreads in SPREADS.items()
    }


def test_equal_for_every_spread_order_and_number_of_ranks(results):
    exact = {exact for ranks in results.values() for spreads in ranks for exact, _ in spreads}
    assert len(exact) == 1
    assert float.fromhex(exact.pop()) == pytest.approx(reference_norm(), rel=1e-14)


def test_adding_as_upstream_does_would_tell_the_spreads_apart(results):
    assert len({plain for ranks in results.values() for _, plain in ranks[0]}) > 1


def other_norms(rank, world_size):
    """Return what the wrapper passes on for the norms that it leaves alone."""
    import torch

    from megatron_dynmo.adapters.grad_norm import exact_grad_norm

    norm_of = exact_grad_norm(lambda *args: args)
    grad = torch.ones(2)
    passed = [norm_of(grad, math.inf), norm_of([grad], 1, None)]
    special = [
        norm_of([torch.tensor([3.0 if rank == 0 else 4.0])]),
        norm_of(torch.tensor([math.inf]) if rank else []),
        norm_of(torch.tensor([math.nan]) if rank else torch.tensor([math.inf])),
        norm_of([]),
        norm_of([torch.zeros(0), torch.zeros(3)]),
    ]
    return [(len(grads), norm, group) for grads, norm, group in passed], special


def test_other_norms_go_to_the_original_and_edge_values_are_said():
    for passed, special in run_ranks(other_norms, 2):
        assert passed == [(1, math.inf, None), (1, 1, None)]
        assert special[:2] == [5.0, math.inf]
        assert math.isnan(special[2])
        assert special[3:] == [0.0, 0.0]


def norms_in_groups(rank, world_size):
    """Return this rank's norm over its own pair of ranks."""
    import torch
    import torch.distributed as dist

    from megatron_dynmo.adapters.grad_norm import exact_grad_norm

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    norm_of = exact_grad_norm(lambda *args: None)
    return norm_of([torch.tensor([float(3 + rank)])], 2.0, pairs[rank // 2])


def test_only_the_given_group_is_summed():
    assert run_ranks(norms_in_groups, 4) == [5.0, 5.0, math.sqrt(61), math.sqrt(61)]


def norms_by_start(rank, world_size):
    """Return the norm of the same values at each of 33 places of a buffer, as hex."""
    import torch

    from megatron_dynmo.adapters.grad_norm import tensor_norms

    values = torch.randn(10_001, generator=torch.Generator().manual_seed(3))
    buffer = torch.empty(10_100)
    norms = []
    for start in range(33):
        view = buffer[start : start + 10_001]
        view.copy_(values)
        norms.append(float(tensor_norms([view])[0]).hex())
    return norms


def test_a_tensor_gives_the_same_norm_wherever_it_starts():
    [norms] = run_ranks(norms_by_start, 1)
    assert len(set(norms)) == 1

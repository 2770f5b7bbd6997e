"""Attention over a sequence cut into context-parallel parts equals attention over the whole."""

from types import SimpleNamespace

from tests.ranks import run_ranks

LENGTH, BATCH, HEADS, WIDTH = 16, 2, 2, 4


def attention(self, query, key, value, mask):
    """Plain attention on [sequence, batch, heads, width]."""
    import torch

    scores = torch.einsum("qbhd,kbhd->bhqk", query, key).masked_fill(mask, float("-inf"))
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value)


def differences(rank, world_size):
    """Largest difference of outputs and of gradients on this rank."""
    import torch
    from megatron.core import parallel_state

    from megatron_dynmo.cpu import context_parallel

    group = torch.distributed.group.WORLD
    parallel_state.get_context_parallel_group = lambda: group
    torch.manual_seed(1)
    whole = [torch.randn(LENGTH, BATCH, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
    weights = torch.randn(LENGTH, BATCH, HEADS, WIDTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    wanted = attention(None, *whole, mask)
    (wanted * weights).sum().backward()

    def mine(tensor):
        parts = tensor.detach().chunk(2 * world_size)
        return torch.cat([parts[i] for i in (rank, 2 * world_size - 1 - rank)])

    own = [mine(tensor).requires_grad_() for tensor in whole]
    module = SimpleNamespace(config=SimpleNamespace(context_parallel_size=world_size))
    forward = context_parallel._attention_over_all_parts(attention)
    found = forward(module, *own, None)
    (found * mine(weights)).sum().backward()
    pairs = [
        (found, mine(wanted)),
        *((a.grad, mine(b.grad)) for a, b in zip(own, whole, strict=True)),
    ]
    return [float((a - b).abs().max()) for a, b in pairs]


def test_outputs_and_gradients_are_those_of_the_whole_sequence():
    for rank in run_ranks(differences, 2):
        assert max(rank) < 1e-5, rank

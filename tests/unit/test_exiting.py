"""Who remains, how the remaining tokens attend, and what carries a loss or a gradient of zero."""

import pytest
import torch

from megatron_dynmo.dynamics.early_exit import exiting
from megatron_dynmo.dynamics.early_exit.exiting import Remaining


def _exited(length=12, batch=3, seed=0, share=0.5):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, batch, generator=generator) < share


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_every_remaining_token_is_computed_once_and_all_others_keep_their_state(num_parts, share):
    exited = _exited(share=share)
    exited[0, 0] = False
    hidden = torch.randn(*exited.shape, 5)
    for rank, (part, left) in enumerate(
        zip(hidden.chunk(num_parts), exited.chunk(num_parts), strict=True)
    ):
        remaining = Remaining.of(exited, rank, num_parts)
        assert len(remaining) == int((~exited).sum()) == sum(remaining.counts)
        found = remaining.place(part, -remaining.select(part))
        assert torch.equal(found, torch.where(left[..., None], part, -part))


def test_all_ranks_of_a_sequence_compute_equally_many_rows_and_agree_on_their_order():
    exited = _exited(share=0.6, seed=3)
    numbers = torch.arange(exited.numel()).view(*exited.shape, 1)
    parts = [Remaining.of(exited, rank, 4) for rank in range(4)]
    assert len({len(part.rows) for part in parts}) == 1
    rows = [
        part.select(own)[: part.num_mine].flatten()
        for part, own in zip(parts, numbers.chunk(4), strict=True)
    ]
    spread = numbers.flatten()[parts[0].flat][parts[0].spread].view(4, -1)
    for part, own, of_all in zip(parts, rows, spread, strict=True):
        assert torch.equal(own, of_all[: part.num_mine])


@pytest.mark.parametrize("given", [False, True], ids=["causal", "a mask that is given"])
def test_remaining_tokens_attend_as_in_attention_over_all_tokens(given):
    torch.manual_seed(0)
    length, batch, heads, groups, width = 10, 2, 4, 2, 3
    exited = _exited(length, batch)
    query = torch.randn(length, batch, heads, width, dtype=torch.float64)
    key, value = torch.randn(2, length, batch, groups, width, dtype=torch.float64)
    masked = torch.ones(length, length, dtype=torch.bool).triu(1).expand(batch, 1, -1, -1)
    if given:
        masked = masked | (torch.rand(batch, 1, length, length) < 0.3)
        masked = masked & ~torch.eye(length, dtype=torch.bool)
    keys, values = (part.repeat_interleave(heads // groups, dim=2) for part in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, keys).masked_fill(masked, float("-inf"))
    wanted = torch.einsum("bhqk,kbhd->qbhd", (scores * 0.7).softmax(-1), values).flatten(2)
    remaining = Remaining.of(exited)
    found = exiting.attend(
        query.flatten(0, 1)[remaining.flat],
        key,
        value,
        remaining,
        scale=0.7,
        masked=masked if given else None,
    )
    assert torch.allclose(found, wanted.flatten(0, 1)[remaining.flat], atol=1e-12)


def test_a_later_token_changes_nothing_for_an_earlier_one():
    torch.manual_seed(0)
    remaining = Remaining.of(_exited(12, 1))
    key, value = torch.randn(2, 12, 1, 1, 4)
    query = torch.randn(len(remaining), 1, 4)
    before = exiting.attend(query, key, value, remaining, scale=1.0)
    key[7:], value[7:] = 9.0, 9.0
    after = exiting.attend(query, key, value, remaining, scale=1.0)
    is_early = remaining.positions < 7
    assert torch.equal(before[is_early], after[is_early])
    assert not torch.equal(before[~is_early], after[~is_early])


def test_confidence_and_saturation_are_from_0_to_1():
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.4, 0.2]]))
    assert torch.allclose(exiting.confidence(logits, "probability"), torch.tensor([0.7, 0.4]))
    assert torch.allclose(exiting.confidence(logits, "gap"), torch.tensor([0.5, 0.0]), atol=1e-6)
    vector = torch.tensor([[3.0, 4.0]])
    assert exiting.saturation(vector, 2 * vector).item() == pytest.approx(1.0)
    assert exiting.saturation(vector, -vector).item() == 0.0


def test_an_attached_loss_adds_its_gradient_and_not_its_value():
    hidden = torch.randn(3, 2, requires_grad=True)
    weight = torch.randn(2, requires_grad=True)
    scale = torch.tensor(0.25)
    out = exiting.attach_loss(hidden, (hidden @ weight).sum(), scale)
    assert torch.equal(out, hidden)
    (out * 3).sum().backward()
    assert torch.allclose(hidden.grad, 3 + 0.25 * weight.detach().expand(3, 2))
    assert torch.allclose(weight.grad, 0.25 * hidden.detach().sum(0))


def test_parameters_that_no_token_reached_get_a_gradient_of_zero():
    hidden = torch.randn(3, requires_grad=True)
    used, frozen = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2))
    frozen.requires_grad_(False)
    out = exiting.keep_in_graph(hidden, [used, frozen])
    assert torch.equal(out, hidden)
    out.sum().backward()
    assert torch.equal(hidden.grad, torch.ones(3))
    assert torch.equal(used.grad, torch.zeros(4)) and frozen.grad is None

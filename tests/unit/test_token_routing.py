"""Tokens that go through a block and tokens that pass by it."""

import pytest
import torch

from megatron_dynmo.dynamics.mixture_of_depths.heads import (
    ChoicePredictor,
    TokenRouter,
    prediction_loss,
    seeded,
    with_loss,
)
from megatron_dynmo.dynamics.mixture_of_depths.token_routing import (
    LocalTokens,
    choose_above,
    choose_top,
    mixed,
    num_slots,
    pick_pairs,
    pick_positions,
)

S, B, H = 12, 3, 8


def run_chosen(block, hidden, chosen, weigh=None):
    """Run a block [k, b, h] -> [k, b, h] on the chosen tokens of hidden [s, b, h]."""
    here = LocalTokens(chosen)
    before = here.take(hidden)
    after = here.collect(block(here.spread(before)))
    return here.put(hidden, mixed(before, after, None if weigh is None else weigh(before)))


def hidden_states(dtype=torch.float32):
    return torch.randn(S, B, H, generator=seeded(1)).to(dtype)


class CausalBlock(torch.nn.Module):
    """Attention without heads and a residual connection, causal by place in what it is given."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.qkv = torch.nn.Linear(H, 3 * H, dtype=dtype)
        self.seen_lengths = []

    def forward(self, hidden):
        self.seen_lengths.append(hidden.shape[0])
        q, k, v = self.qkv(hidden).transpose(0, 1).chunk(3, dim=-1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return hidden + out.transpose(0, 1)


def test_the_whole_sequence_without_weights_is_the_plain_block_bit_for_bit():
    block, hidden = CausalBlock(), hidden_states()
    router = TokenRouter(H, seeded(0))
    chosen = choose_top(router(hidden), num_slots(S, 1.0))
    assert torch.equal(run_chosen(block, hidden, chosen), block(hidden))


def test_tokens_that_were_not_chosen_keep_every_bit_and_the_block_sees_the_others_in_order():
    hidden = hidden_states(torch.bfloat16)
    hidden[3, 0, 0] = -0.0
    router = TokenRouter(H, seeded(0))
    chosen = choose_top(router(hidden), num_slots(S, 0.25))
    assert chosen.positions.shape == (3, B)
    assert (chosen.positions.diff(dim=0) > 0).all()
    seen = []

    def block(short):
        seen.append(short)
        return short + 1

    merged = run_chosen(block, hidden, chosen, router.weigh)
    mask = chosen.mask()
    assert mask.sum() == 3 * B
    unchanged = merged.view(torch.int16) == hidden.view(torch.int16)
    assert unchanged[~mask].all() and not unchanged[mask].any()
    for sample in range(B):
        assert torch.equal(seen[0][:, sample], hidden[chosen.positions[:, sample], sample])


def test_the_highest_logits_are_chosen_and_of_equal_ones_the_earlier():
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0, 1.0]]).t()
    assert choose_top(logits, 2).positions.flatten().tolist() == [1, 2]
    assert choose_top(torch.zeros(5, 1), 3).positions.flatten().tolist() == [0, 1, 2]


def test_slots_are_rounded_to_the_nearest_token_and_up_to_a_multiple():
    assert num_slots(1024, 0.125) == 128
    assert num_slots(32, 0.125) == 4
    assert num_slots(7, 0.01) == 1
    assert num_slots(32, 0.3) == 10
    assert num_slots(32, 0.3, multiple_of=4) == 12


def test_gradients_are_those_of_finite_differences_and_reach_the_router():
    router = TokenRouter(H, seeded(0)).double()
    block = CausalBlock(torch.float64)
    hidden = hidden_states(torch.float64).requires_grad_()
    chosen = choose_top(router(hidden).detach(), 4)

    def run(hidden, weight, qkv):
        return torch.func.functional_call(
            _Routed(block, router, chosen),
            {"router.weight": weight, "block.qkv.weight": qkv},
            hidden,
        )

    weight, qkv = router.weight, block.qkv.weight
    assert torch.autograd.gradcheck(run, (hidden, weight, qkv))
    run(hidden, weight, qkv).square().sum().backward()
    assert weight.grad.norm() > 0


class _Routed(torch.nn.Module):
    def __init__(self, block, router, chosen):
        super().__init__()
        self.block, self.router, self.chosen = block, router, chosen

    def forward(self, hidden):
        return run_chosen(self.block, hidden, self.chosen, self.router.weigh)


@pytest.mark.parametrize("seed", range(5))
def test_a_predictor_never_looks_ahead(seed):
    router, predictor = TokenRouter(H, seeded(seed)), ChoicePredictor(H, seeded(seed + 9))
    block = CausalBlock()

    def run(hidden):
        return run_chosen(block, hidden, choose_above(predictor(hidden)), router.weigh)

    hidden = hidden_states()
    for place in range(S):
        changed = hidden.clone()
        changed[place] = torch.randn(B, H, generator=seeded(seed)) * 3
        same = run(changed)[:place] == run(hidden)[:place]
        assert same.all(), place


def test_expert_choice_does_look_ahead_so_the_test_above_can_fail():
    logits = torch.zeros(S, 1)
    logits[2] = 1.0
    ahead = logits.clone()
    ahead[S - 1] = 2.0
    assert choose_top(logits, 1).mask()[2] and not choose_top(ahead, 1).mask()[2]


def test_samples_that_choose_fewer_tokens_are_filled_up_behind_them():
    logits = torch.tensor([[1.0, -1, 1, 1], [-1, -1, -1, 1], [-1, -1, -1, -1]]).t()
    chosen = choose_above(logits)
    assert chosen.positions.shape == (3, 3)
    assert chosen.is_token.t().tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert chosen.positions[:, 0].tolist() == [0, 2, 3] and chosen.positions[0, 1] == 3
    assert torch.equal(chosen.mask(), logits > 0)
    hidden = torch.randn(4, 3, H)
    merged = run_chosen(lambda short: short * 2, hidden, chosen)
    assert torch.equal(merged, torch.where((logits > 0)[..., None], hidden * 2, hidden))
    assert choose_above(logits, multiple_of=4).positions.shape == (4, 3)


def test_a_block_runs_even_if_nothing_is_chosen():
    block, hidden = CausalBlock(), hidden_states().requires_grad_()
    chosen = choose_above(torch.full((S, B), -1.0))
    merged = run_chosen(block, hidden, chosen)
    assert torch.equal(merged, hidden) and block.seen_lengths == [1]
    merged.sum().backward()
    # Wrappers wait for a gradient of every parameter.
    assert not block.qkv.weight.grad.any()


@pytest.mark.parametrize("choose", [lambda x: choose_top(x, 6), choose_above])
def test_parts_of_a_sequence_on_ranks_are_together_the_whole(choose):
    hidden, router = hidden_states(), TokenRouter(H, seeded(0))
    chosen = choose(router(hidden))
    parts = [LocalTokens(chosen, start, S // 3) for start in range(0, S, S // 3)]
    slices = hidden.split(S // 3)
    spread = [part.spread(part.take(x)) for part, x in zip(parts, slices, strict=True)]
    whole = LocalTokens(chosen)
    short = whole.spread(whole.take(hidden))
    assert torch.equal(sum(spread), short)
    after = short * 3
    merged = torch.cat(
        [part.put(x, part.collect(after)) for part, x in zip(parts, slices, strict=True)]
    )
    assert torch.equal(merged, whole.put(hidden, whole.collect(after)))
    assert sum(part.num_tokens for part in parts) == whole.num_tokens == chosen.mask().sum()


def test_positions_and_masks_are_those_of_the_chosen_tokens():
    logits = torch.randn(S, B, generator=seeded(3))
    chosen = choose_top(logits, 5)
    table = torch.randn(S, 1, 1, 4)
    picked = pick_positions(table, chosen)
    assert picked.shape == (5, B, 1, 4)
    assert torch.equal(picked[2, 1], table[chosen.positions[2, 1], 0])
    assert torch.equal(pick_positions(table.expand(S, B, 1, 4), chosen), picked)
    # Two documents in a sequence, which must not see each other.
    mask = torch.ones(S, S).triu(1).bool()
    mask[6:, :6] = True
    pairs = pick_pairs(mask.expand(1, 1, S, S), chosen)
    assert torch.equal(pairs, pick_pairs(mask.expand(B, 1, S, S), chosen))
    for sample in range(B):
        places = chosen.positions[:, sample]
        assert torch.equal(pairs[sample, 0], mask[places][:, places])


def test_no_token_sees_what_fills_up_its_sample():
    chosen = choose_above(torch.tensor([[-1.0, 1, 1], [-1, -1, 1]]).t())
    pairs = pick_pairs(torch.ones(3, 3).triu(1).bool().expand(2, 1, 3, 3), chosen)
    assert not chosen.is_token[1, 1] and pairs[1, 0, 0, 1]


def test_the_predictor_learns_the_choice_and_nothing_else_feels_it():
    router, predictor = TokenRouter(H, seeded(0)), ChoicePredictor(H, seeded(1))
    optimizer = torch.optim.Adam(predictor.parameters(), lr=1e-2)
    hidden = torch.randn(64, 8, H, generator=seeded(2)).requires_grad_()
    is_chosen = choose_top(router(hidden), 16).mask()
    before = ((predictor(hidden) > 0) == is_chosen).float().mean()
    for _ in range(300):
        optimizer.zero_grad()
        prediction_loss(predictor(hidden), is_chosen).div(512).backward()
        optimizer.step()
    after = ((predictor(hidden) > 0) == is_chosen).float().mean()
    assert after > 0.9 > before
    assert hidden.grad is None and router.weight.grad is None


def test_a_loss_of_its_own_changes_gradients_but_not_the_output():
    x, y = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    output = with_loss(2 * x, y.sum() * 3, lambda one: one * 5)
    assert torch.equal(output, 2 * x)
    output.sum().backward()
    assert x.grad.tolist() == [2.0] * 3 and y.grad.tolist() == [15.0] * 2


def test_routers_do_not_depend_on_how_large_hidden_states_are():
    router, hidden = TokenRouter(H, seeded(0)), hidden_states()
    torch.testing.assert_close(router(hidden), router(hidden * 1e4))
    assert router(hidden.bfloat16()).dtype == torch.float32
    assert router.weigh(hidden * 1e30).isfinite().all()


def test_a_router_that_does_not_learn_is_saved_all_the_same():
    router = TokenRouter(H, seeded(0), learns=False)
    assert not list(router.parameters()) and list(router.state_dict()) == ["weight"]
    assert torch.equal(router.weight, TokenRouter(H, seeded(0)).weight)

"""Attention within buckets equals a masked dense one, for any hash, and its work follows blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dynmo.dynamics.sparse_attention.flex_attention import block_mask, flex_hash_attention
from megatron_dynmo.dynamics.sparse_attention.hash_attention import hash_attention
from megatron_dynmo.dynamics.sparse_attention.hash_blocks import blocks_of, hash_order

SCALE = 0.35
INPUTS = ("query", "key", "value")


def problem(length, *, heads=1, groups=2, rounds=1, buckets=3, shared=False, seed=0, dim=6):
    """Random inputs with gradients, and random codes; `shared`: one code for query and key."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads * length, dim), (length, dim), (length, dim - 1))
    inputs = [
        torch.randn(groups, *shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]
    draw = (rounds, groups, heads * length)
    query_codes = torch.randint(0, buckets, draw, generator=generator)
    key_codes = torch.randint(0, buckets, (rounds, groups, length), generator=generator)
    return (*inputs, key_codes.repeat(1, 1, heads) if shared else query_codes, key_codes)


def sees(query_codes, key_codes):
    """The definition: the same token, or an earlier one with an equal code in some round."""
    length = key_codes.shape[-1]
    position = torch.arange(length)
    query_position = position.repeat(query_codes.shape[-1] // length).unsqueeze(1)
    equal = (query_codes.unsqueeze(-1) == key_codes.unsqueeze(-2)).any(0)
    return equal & (position < query_position) | (position == query_position)


def dense(query, key, value, query_codes, key_codes):
    scores = (query @ key.transpose(1, 2)) * SCALE
    return scores.masked_fill(~sees(query_codes, key_codes), -math.inf).softmax(-1) @ value


def sparse(*inputs, **settings):
    return hash_attention(*inputs, softmax_scale=SCALE, **settings)[0]


def assert_equals_dense(inputs, **settings):
    ours, reference = sparse(*inputs, **settings), dense(*inputs)
    torch.testing.assert_close(ours, reference)
    weight = torch.randn_like(ours)
    ours_grads = torch.autograd.grad(ours, inputs[:3], weight)
    reference_grads = torch.autograd.grad(reference, inputs[:3], weight)
    for name, grad, expected in zip(INPUTS, ours_grads, reference_grads, strict=True):
        torch.testing.assert_close(grad, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("length", [1, 2, 7, 128, 130, 300])
def test_one_bucket_is_dense_causal_attention(length):
    query, key, value, *_ = problem(length)
    codes = torch.zeros(1, 2, length, dtype=torch.int64)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE)
    torch.testing.assert_close(sparse(query, key, value, codes, codes), expected)
    assert_equals_dense((query, key, value, codes, codes))


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    heads=st.integers(1, 3),
    rounds=st.integers(1, 3),
    buckets=st.sampled_from([1, 2, 3, 8, 100]),
    shared=st.booleans(),
    block_size=st.sampled_from([1, 3, 16, 128]),
    seed=st.integers(0, 1000),
)
def test_any_hash_equals_the_masked_dense_reference(block_size, **shape):
    assert_equals_dense(problem(**shape), block_size=block_size)


@pytest.mark.parametrize("skew", ["all queries in a bucket without keys", "one bucket of most"])
def test_skewed_buckets(skew):
    query, key, value, query_codes, key_codes = problem(300, buckets=2, heads=2)
    if skew.startswith("all"):
        query_codes = query_codes + 5
    else:
        query_codes, key_codes = query_codes * 0 + 1, (key_codes + torch.arange(300) % 9) // 2
    assert_equals_dense((query, key, value, query_codes, key_codes))


def test_equal_keys_average_the_values_of_the_bucket():
    query, key, value, codes, _ = problem(50, buckets=2, shared=True)
    key = torch.ones_like(key)
    seen = sees(codes, codes).double()
    torch.testing.assert_close(
        sparse(query, key, value, codes, codes), seen / seen.sum(-1, keepdim=True) @ value
    )


def test_a_token_alone_in_its_bucket_keeps_its_value():
    query, key, value, *_ = problem(150, groups=2)
    codes = torch.stack([torch.randperm(150) for _ in range(2)]).unsqueeze(0)
    context, computed = hash_attention(query, key, value, codes, codes, softmax_scale=SCALE)
    assert torch.equal(context, value)
    # Blocks pack 128 of such tokens; no row of scores is wider than that.
    assert computed <= 2 * 150 * 128


@pytest.mark.parametrize("rounds", [1, 2])
def test_gradcheck(rounds):
    *inputs, query_codes, key_codes = problem(9, heads=2, rounds=rounds, dim=3)
    assert torch.autograd.gradcheck(
        lambda *x: sparse(*x, query_codes, key_codes, block_size=4), inputs
    )


@pytest.mark.parametrize("now", [0, 1, 63, 149])
def test_the_past_does_not_see_the_future(now):
    """Neither by values nor through sorting: later tokens change their vectors and their codes."""
    inputs = problem(150, rounds=2, shared=True)
    before = sparse(*inputs)
    grads = torch.autograd.grad(before[:, : now + 1].sum(), inputs[:3])
    assert all(not grad[:, now + 1 :].any() for grad in grads), "exactly zero"
    other = problem(150, rounds=2, shared=True, buckets=9, seed=1)
    pairs = zip(inputs[:3], other[:3], strict=True)
    mixed = [torch.cat((old[:, : now + 1], new[:, now + 1 :]), 1) for old, new in pairs]
    codes = torch.cat((inputs[3][..., : now + 1], other[3][..., now + 1 :]), -1)
    torch.testing.assert_close(sparse(*mixed, codes, codes)[:, : now + 1], before[:, : now + 1])


def test_extreme_scores_stay_finite():
    query, key, value, query_codes, key_codes = problem(40)
    inputs = (query * 1e4, key * 1e4, value, query_codes, key_codes)
    torch.testing.assert_close(sparse(*inputs), dense(*inputs))


def test_half_precision_keeps_its_dtype_and_float32_accuracy():
    *inputs, query_codes, key_codes = problem(100)
    half = [x.detach().bfloat16().requires_grad_() for x in inputs]
    context = sparse(*half, query_codes, key_codes)
    context.sum().backward()
    assert context.dtype == half[0].grad.dtype == torch.bfloat16
    exact = dense(*(x.double() for x in half), query_codes, key_codes)
    assert torch.equal(context, exact.bfloat16()) or (context - exact).abs().max() < 2**-7


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // 8)
        return result


def test_time_and_memory_follow_the_blocks():
    length, buckets = 512, 4
    query, key, value, codes, _ = problem(length, groups=1, buckets=buckets, shared=True)

    def work(codes):
        with LargestTensor() as largest:
            context, computed = hash_attention(query, key, value, codes, codes, softmax_scale=SCALE)
            context.sum().backward()
        return int(computed), largest.numel

    dense_scores, _ = work(torch.zeros_like(codes))
    assert length**2 / 2 < dense_scores < length**2 * 0.65
    scores, largest = work(codes)
    assert scores < dense_scores / buckets * 2
    assert largest <= max(length * 6, 128 * 2 * length // buckets)


@pytest.mark.parametrize("size", [1, 4, 128])
def test_blocks_hold_every_visible_pair_once(size):
    *_, query_codes, key_codes = problem(90, heads=2, rounds=2, buckets=5)
    order = hash_order(query_codes, key_codes)
    pairs = torch.zeros(2, 2, 180, 90)
    for r, round_ in enumerate(blocks_of(order, query_codes, size)):
        for g, group in enumerate(round_):
            for block in group:
                assert block.rows.stop - block.rows.start <= size
                pairs[r, g, block.rows, block.columns] += 1
    assert pairs.max() == 1
    place = torch.arange(90)
    visible = (place >= order.first.unsqueeze(-1)) & (place < order.last.unsqueeze(-1))
    assert not (visible & (pairs == 0)).any()


@pytest.mark.parametrize(
    ("length", "heads", "rounds", "buckets"),
    [(1, 1, 1, 1), (100, 2, 1, 200), (256, 1, 2, 1), (257, 2, 3, 4), (300, 1, 1, 3)],
)
def test_flex_attention_computes_the_same(length, heads, rounds, buckets):
    """Its logic, by torch's own uncompiled path; the CUDA kernel is not run here."""
    *inputs, query_codes, key_codes = problem(
        length, heads=heads, rounds=rounds, buckets=buckets, dim=8
    )
    inputs = [x.detach().float() for x in (*inputs[:2], inputs[1] * 2)]
    with torch.no_grad():
        context, _ = flex_hash_attention(*inputs, query_codes, key_codes, SCALE)
    torch.testing.assert_close(context, dense(*inputs, query_codes, key_codes))
    order = hash_order(query_codes, key_codes)
    for round_ in range(rounds):
        mask = block_mask(order, query_codes, key_codes, round_)
        listed = mask.to_dense()[:, 0].repeat_interleave(128, 1).repeat_interleave(128, 2)
        place = torch.arange(length)
        first, last = order.first[round_].unsqueeze(-1), order.last[round_].unsqueeze(-1)
        visible = (place >= first) & (place < last)
        assert (listed[:, : heads * length, :length].bool() | ~visible).all()

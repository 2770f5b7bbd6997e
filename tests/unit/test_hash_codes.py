"""Hashing sees one token at a time, and random directions that depend on nothing of the layout."""

import torch

from megatron_dynmo.dynamics.sparse_attention.hash_codes import hash_codes, rotations


def directions(buckets=6, **changed):
    arguments = dict(seed=1234, layer_number=3, iteration=7, num_groups=4, num_rounds=2)
    return rotations(**{**arguments, **changed}, head_dim=16, num_buckets=buckets)


def vectors(tokens=200, groups=4):
    return torch.randn(groups, tokens, 16, generator=torch.Generator().manual_seed(5))


def test_directions_are_a_function_of_seed_layer_and_iteration():
    state = torch.get_rng_state()
    assert torch.equal(directions(), directions())
    assert torch.equal(torch.get_rng_state(), state), "no other random number is drawn"
    for change in ({"seed": 1}, {"layer_number": 4}, {"iteration": 8}):
        assert not torch.equal(directions(), directions(**change))


def test_a_tensor_parallel_rank_finds_the_codes_of_its_heads():
    whole = hash_codes(vectors(), directions(), 6)
    parts = [hash_codes(vectors()[i : i + 2], directions()[:, i : i + 2], 6) for i in (0, 2)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_a_code_depends_on_its_token_alone():
    whole, changed = vectors(), vectors()
    changed[:, 100:] = -3.0
    codes, after = (hash_codes(x, directions(), 6) for x in (whole, changed))
    assert torch.equal(codes[..., :100], after[..., :100])
    assert torch.equal(hash_codes(whole * 4, directions(), 6), codes), "nor on its length"


def test_every_bucket_is_used_and_no_other():
    for buckets in (1, 2, 3, 5, 8):
        codes = hash_codes(vectors(2000), directions(buckets), buckets)
        assert codes.unique().tolist() == list(range(buckets))


def test_near_vectors_share_a_bucket_far_ones_do_not():
    near = vectors() + 0.1 * vectors().flip(1)
    codes = hash_codes(vectors(), directions(), 6)
    shared = (codes == hash_codes(near, directions(), 6)).float().mean()
    opposite = (codes == hash_codes(-vectors(), directions(), 6)).float().mean()
    assert shared > 0.8
    assert opposite == 0

"""Hash attention in the place of Megatron's own core attention, on one rank."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_dynmo.cpu import cpu_specs
from megatron_dynmo.dynamics.sparse_attention.core import SparseCore
from megatron_dynmo.dynamics.sparse_attention.hash_codes import Hashing, hash_codes, rotations
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.patching import patched

LENGTH, BATCH, HEADS, GROUPS, DIM = 70, 2, 6, 3, 8
SEED, LAYER, ITERATION = 7, 3, 5


@pytest.fixture
def attention(tmp_path):
    """A layer's `self_attention` as far as the core attention is concerned."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    with patched(cpu_specs()):
        dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            **dict(num_layers=4, hidden_size=HEADS * DIM, num_attention_heads=HEADS),
            **dict(num_query_groups=GROUPS, attention_dropout=0.0),
        )
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        core = DotProductAttention(config, LAYER, AttnMaskType.causal, "self", pg_collection=groups)
        yield SimpleNamespace(
            core_attention=core,
            config=config,
            pg_collection=groups,
            attn_mask_type=AttnMaskType.causal,
        )
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def inputs(shift=0.0, spread=1.0):
    generator = torch.Generator().manual_seed(2)
    shapes = [(LENGTH, BATCH, n, DIM) for n in (HEADS, GROUPS, GROUPS)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.mul_(spread).add_(shift).requires_grad_() for x in drawn]


def attach(attention, **changed):
    """Put hash attention in place and return the list that its counts go to."""
    hashing = dict(buckets=3, rounds=2, is_shared=False, seed=SEED, iteration=ITERATION)
    counts = []
    now = Hashing(**{**hashing, **changed})
    SparseCore(attention, LAYER, lambda: now, lambda *numbers: counts.append(numbers))
    return counts


def outcome(core, tensors):
    context = core(*tensors, None)
    return [context, *torch.autograd.grad(context.square().sum(), tensors)]


def visible(query, key, is_shared):
    """Which keys `[b, heads, s, s]` a query sees, from the definition, head by head."""
    directions = rotations(SEED, LAYER, ITERATION, GROUPS, 2, DIM, 3)
    found = torch.empty(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.bool)
    for b in range(BATCH):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            mine = directions[:, group : group + 1]
            of_key = hash_codes(key[:, b, group].unsqueeze(0), mine, 3)
            of_query = hash_codes(query[:, b, head].unsqueeze(0), mine, 3)
            of_query = of_key if is_shared else of_query
            same = (of_query.unsqueeze(-1) == of_key.unsqueeze(-2)).any(0)[0]
            found[b, head] = same.tril() | torch.eye(LENGTH, dtype=torch.bool)
    return found


@pytest.mark.parametrize("is_shared", [False, True])
def test_equals_masked_attention_with_the_heads_groups_and_batch_of_megatron(attention, is_shared):
    tensors = inputs()
    counts = attach(attention, is_shared=is_shared)
    found = outcome(attention.core_attention, tensors)

    def masked(query, key, value):
        k, v = (x.repeat_interleave(HEADS // GROUPS, 2).permute(1, 2, 0, 3) for x in (key, value))
        scores = query.permute(1, 2, 0, 3) @ k.transpose(2, 3) / math.sqrt(DIM)
        scores = scores.masked_fill(~visible(query, key, is_shared), -math.inf)
        return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)

    expected = outcome(lambda q, k, v, mask: masked(q, k, v), tensors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert counts[0][1] == BATCH * HEADS * LENGTH * (LENGTH + 1) / 2
    attention.core_attention.eval()
    attention.core_attention(*tensors, None)
    assert len(counts) == 1, "evaluation does not count"


def test_equals_megatrons_attention_where_all_tokens_share_a_bucket(attention):
    tensors = inputs(shift=1.0, spread=0.02)  # all point the same way
    expected = outcome(attention.core_attention, tensors)
    attach(attention)
    for ours, theirs in zip(outcome(attention.core_attention, tensors), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_packed_sequences_that_nothing_refused_before_are_named(attention):
    attach(attention)
    with pytest.raises(ConfigError, match="packed sequences or a bias of attention"):
        attention.core_attention(*inputs(), None, packed_seq_params=object())


def test_one_bucket_is_megatrons_attention_itself(attention):
    tensors = inputs()
    expected = outcome(attention.core_attention, tensors)
    attach(attention, buckets=1)
    for ours, theirs in zip(outcome(attention.core_attention, tensors), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_other_attention_is_refused_by_name(attention):
    from megatron.core.transformer.enums import AttnMaskType

    attention.attn_mask_type = AttnMaskType.padding
    with pytest.raises(ConfigError, match=r"layer 3 .* causal dot product attention only"):
        attach(attention)
    attention.core_attention = torch.nn.Identity()
    with pytest.raises(ConfigError, match="Identity"):
        attach(attention)

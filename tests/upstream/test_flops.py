"""Operations of an iteration when layers do less, by Megatron's own formula."""

from argparse import Namespace

import pytest

from megatron_dynmo.adapters.flops import less_skipped

SIZES = dict(
    num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, kv_channels=16,
    group_query_attention=False, num_query_groups=None, seq_length=32, swiglu=True,
    padded_vocab_size=512, multi_latent_attention=False, attention_output_gate=False,
    experimental_attention_variant=None, mtp_num_layers=None, hybrid_layer_pattern=None,
    num_experts=None, moe_layer_freq=1, moe_router_topk=2, moe_ffn_hidden_size=32,
    moe_latent_size=None, moe_shared_expert_intermediate_size=None,
)  # fmt: skip


def count(args):
    from megatron.training.training import num_floating_point_operations

    return num_floating_point_operations(args, 2)


@pytest.mark.parametrize("more", [{}, {"num_experts": 8, "moe_layer_freq": [0, 1, 1, 0]}])
def test_layers_that_do_nothing_leave_the_rest(more):
    args = Namespace(**SIZES | more)
    none = Namespace(**vars(args) | {"num_layers": 0, "num_experts": None})
    everything, nothing = [(1.0, 1.0)] * 4, [(0.0, 0.0)] * 4
    assert less_skipped(count, args, everything) == count(args)
    assert less_skipped(count, args, nothing) == pytest.approx(count(none))
    one = less_skipped(count, args, [(1, 1), (1, 0), (1, 1), (1, 1)])
    layers = count(args) - count(none)
    assert 0 < count(args) - one < layers / 2 and args.num_layers == 4

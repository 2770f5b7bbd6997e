"""The flags of early exit and the costs that follow from survivors."""

from argparse import Namespace

import pytest

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.early_exit.support import refusals
from megatron_dynmo.dynamics.early_exit.tally import layer_shares
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.early_exit import parse_schedule


def test_a_schedule_is_straight_between_its_points_and_constant_outside():
    schedule = parse_schedule("10:1; 20:0.5;30:0.5", "--x")
    found = [schedule.at(iteration) for iteration in (1, 10, 12, 20, 25, 99)]
    assert found == pytest.approx([1, 1, 0.9, 0.5, 0.5, 0.5])
    assert parse_schedule("inf", "--x").at(3) == float("inf")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("often", "'often' is no number and no ITER:VALUE"),
        ("5:0.9;5:0.8", "5 follows 5"),
        ("-1", "at least 0"),
        ("nan", "at least 0"),
        ("1:inf;9:0.5", "no straight line from inf to 0.5"),
    ],
)
def test_a_wrong_schedule_is_refused_by_name(text, said):
    with pytest.raises(ConfigError, match=said) as refusal:
        DynMoConfig(early_exit="confidence", early_exit_threshold=text)
    assert "--dynmo-early-exit-threshold" in str(refusal.value)


def test_flags_that_would_do_nothing_or_cannot_be_carried_are_refused():
    with pytest.raises(ConfigError, match="no effect without --dynmo-early-exit"):
        DynMoConfig(early_exit_threshold="0.5")
    with pytest.raises(ConfigError, match="65537 must be from 2 to 65536"):
        DynMoConfig(early_exit="confidence", early_exit_classes=65537)
    assert DynMoConfig().dynamics == ()
    assert "early_exit" in DynMoConfig(early_exit="saturation").dynamics


def test_a_layer_costs_its_keys_and_values_and_what_the_survivors_need():
    args = Namespace(
        **{"hidden_size": 8, "kv_channels": 2, "num_attention_heads": 4, "seq_length": 16},
        **{"group_query_attention": False, "swiglu": False, "ffn_hidden_size": 32},
    )
    shares = layer_shares(args, num_classes=4)
    # Multiplications a token: keys and values 128, queries and projection 128, scores and their
    # use 256, MLP 512; the head 32.
    assert shares.of(1.0, has_exit=False) == 1.0
    assert shares.of(0.25, has_exit=False) == pytest.approx((128 + 0.25 * 896) / 1024)
    assert shares.of(0.25, has_exit=True) == pytest.approx((128 + 0.25 * 928) / 1024)
    assert shares.of(1.0, has_exit=True) == pytest.approx(1056 / 1024)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"transformer_impl": "transformer_engine"}, "use --transformer-impl local"),
        ({"context_parallel_size": 2}, "--context-parallel-size: ranks exchange equal parts"),
        ({"num_experts": 8}, "--num-experts: routers balance over all tokens"),
        ({"sft": True}, "--sft: packed sequences"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl: a captured graph"),
        ({"position_embedding_type": "mrope"}, "use rope or"),
        ({"num_layers": 3}, "--dynmo-early-exit-min-layer 3 of 3 layers leaves no layer"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(flags, said):
    config = DynMoConfig(early_exit="saturation", early_exit_min_layer=3)
    plain = {
        **{"num_layers": 4, "transformer_impl": "local", "context_parallel_size": 1},
        **{"num_experts": None, "cuda_graph_impl": "none", "softmax_type": "vanilla"},
    }
    assert refusals(config, Namespace(**plain)) == []
    (reason,) = refusals(config, Namespace(**{**plain, **flags}))
    assert said in reason

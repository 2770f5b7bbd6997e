"""What the ways of pruning know of a model, without one: counts, refusals, saved state."""

from argparse import Namespace
from fractions import Fraction

import pytest

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.pruning.dynamic import Pruning
from megatron_dynmo.dynamics.pruning.magnitude import MagnitudePruning
from megatron_dynmo.dynamics.pruning.units import UnitPruning
from megatron_dynmo.errors import ConfigError


def arguments(**changed):
    defaults = {
        "num_layers": 3,
        "hidden_size": 8,
        "ffn_hidden_size": 40,
        "num_attention_heads": 4,
        "group_query_attention": False,
        "kv_channels": 2,
        "swiglu": False,
        "seq_length": 16,
        "micro_batch_size": 1,
        "tensor_model_parallel_size": 1,
        "train_iters": 100,
    }
    return Namespace(**{**defaults, **changed})


def config(kind, **changed):
    return DynMoConfig(prune=kind, **{f"prune_{name}": value for name, value in changed.items()})


def test_amounts_are_exact_down_to_one_weight():
    method = MagnitudePruning(config("magnitude"), arguments())
    total = 3 * (4 * 8 * 8 + 2 * 8 * 40)
    assert method.due(Fraction(9, 10)) == total * 9 // 10
    assert method.due(Fraction(1, total)) == 1
    assert method.due(Fraction(1, total + 1)) == 0
    method = UnitPruning(config("neuron", multiple=4), arguments())
    assert method.due(Fraction(9, 10)) == 27


@pytest.mark.parametrize(
    ("kind", "settings", "args", "message"),
    [
        ("head", {"final": 0.9}, {}, "at most 0.75"),
        ("neuron", {"groups": 3}, {}, "40 neurons do not divide into 3"),
        ("neuron", {"groups": 4}, {"tensor_model_parallel_size": 8}, "no multiple of the tensor"),
        ("neuron", {"multiple": 16}, {}, "multiple of 16"),
        ("magnitude", {"pattern": "2:4", "final": 0.5}, {"hidden_size": 6}, "no whole groups of 4"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(kind, settings, args, message):
    with pytest.raises(ConfigError, match=message):
        Pruning(config(kind, **settings), arguments(**args))


def test_the_last_step_is_the_final_share_by_default():
    schedule = config("neuron").pruning_schedule(100)
    assert (schedule.begin, schedule.end, schedule.every) == (30, 70, 10)
    assert schedule.sparsity(70) == Fraction(9, 10)
    config("neuron", begin=500)  # later than any default end
    with pytest.raises(ConfigError, match="begins after iteration 9 and ends after 4"):
        config("neuron", begin=9, end=4)


def test_a_saved_state_is_taken_up_and_a_strange_one_refused():
    settings = config("neuron", groups=2)
    dynamic = Pruning(settings, arguments())
    state = {**dynamic.state(), "slices": [20, 3, 11]}
    dynamic.restore(state)
    assert dynamic.state() == state
    assert dynamic.counters()["sparsity/layer_2"] == pytest.approx(0.85)
    assert dynamic.factors(1) == (1.0, 1.0)
    # attention 256, core 2 * 16 * 8, MLP 640 multiplications a token
    assert dynamic.factors(2).forward == pytest.approx((512 + 640 * 0.15) / 1152)
    with pytest.raises(ConfigError, match="2 entries, 3 are needed"):
        dynamic.restore({**state, "slices": [20, 3]})
    with pytest.raises(ConfigError, match="give --dynmo-prune-groups 2"):
        Pruning(config("neuron"), arguments()).restore(state)
    with pytest.raises(ConfigError, match="--dynmo-prune neuron"):
        Pruning(config("magnitude"), arguments()).restore(state)

    magnitude = Pruning(config("magnitude", compute="sparse"), arguments())
    halved = magnitude.state()
    halved["left"][1] = [[n // 2 for n in matrix] for matrix in halved["left"][1]]
    magnitude.restore(halved)
    assert magnitude.counters()["sparsity"] == pytest.approx(1 / 6)
    assert magnitude.work(2).backward == pytest.approx((896 / 2 + 256) / 1152)
    assert magnitude.factors(2) == (1.0, 1.0), "nobody has measured what a flag demands"
    with pytest.raises(ConfigError, match="pruned with --dynmo-prune-pattern any: go on with it"):
        two_of_four = config("magnitude", pattern="2:4", final=0.5)
        Pruning(two_of_four, arguments()).restore(halved)
    with pytest.raises(ConfigError, match="resume with --tensor-model-parallel-size 1"):
        Pruning(config("magnitude"), arguments(tensor_model_parallel_size=2)).restore(halved)


def test_features_that_keep_weights_in_ways_of_their_own_are_refused():
    args = arguments(
        transformer_impl="transformer_engine", num_experts=4, ckpt_format="torch", save="x"
    )
    refused = " ".join(Pruning.refusals(config("neuron"), args))
    for remedy in ("--transformer-impl local", "--num-experts", "use torch_dist"):
        assert remedy in refused
    args = arguments(group_query_attention=True, num_query_groups=1, tensor_model_parallel_size=2)
    assert "1 query groups are shared by 2" in " ".join(Pruning.refusals(config("head"), args))
    assert Pruning.refusals(config("neuron"), args) == []

"""Scenario equations against values worked out by hand."""

import math

import numpy as np
import pytest

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.catalogue import SCENARIOS, make_scenario
from megatron_dynmo.simulate.drift import changes, drift, ramp, steps_done
from megatron_dynmo.simulate.model import TransformerModel
from megatron_dynmo.simulate.scenarios import (
    EarlyExit,
    ExpertRouting,
    GradualPruning,
    LayerFreezing,
    MixtureOfDepths,
    SparseAttention,
)

MODEL = TransformerModel(num_layers=8, hidden=16, seq_length=32, vocab_size=100)
# FLOPs of a token in a layer over h: 24 x 16 + 4 x 32 = 512, of which the core has 128.


def test_shares_of_a_layer_are_its_flops():
    assert MODEL.core_share == 128 / 512
    assert MODEL.mlp_share == 256 / 512
    assert MODEL.key_value_share == 64 / 512
    assert MODEL.layer_bytes == 12 * 16**2 * 18
    trace = MODEL.trace(np.ones((2, 8)))
    assert trace.forward_ms.tolist() == [[10.0] * 8] * 2
    assert trace.backward_ms.tolist() == [[20.0] * 8] * 2
    assert trace.extra_forward_ms.tolist() == [[0.0, 10.0 * 200 / 512]] * 2
    assert trace.extra_backward_ms.tolist() == [[0.0, 20.0 * 200 / 512]] * 2
    assert trace.extra_memory_bytes == (100 * 16 * 18, 100 * 16 * 18)
    assert trace.activation_bytes[0] == 34 * 32 * 16


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_scenario_is_repeatable_and_never_costs_less_than_nothing(name):
    scenario = make_scenario(name)
    one, two = (scenario.trace(MODEL, 50, seed=3) for _ in range(2))
    for field in ("forward_ms", "backward_ms", "memory_bytes"):
        np.testing.assert_array_equal(getattr(one, field), getattr(two, field))
    assert one.forward_ms.shape == (50, 8)
    assert (one.forward_ms > 0).all()


# ---------------------------------------------------------------- pruning


def test_sparsity_follows_the_cubic_and_ends_exactly():
    scenario = GradualPruning(initial_sparsity=0.1, final_sparsity=0.9, num_steps=4)
    by_hand = [0.9 - 0.8 * (1 - k / 4) ** 3 for k in range(5)]
    assert [scenario.sparsity_after(k) for k in range(5)] == pytest.approx(by_hand)
    assert scenario.sparsity_after(4) == 0.9
    assert GradualPruning().sparsity_after(0) == 0.0
    assert GradualPruning().sparsity_after(2) == pytest.approx(0.9 * 7 / 8)


def test_one_threshold_prunes_the_small_layers_more():
    scale = np.array([2.0, 1.0, 0.5])
    layers = GradualPruning().layer_sparsity(0.6, scale)
    assert layers.mean() == pytest.approx(0.6, abs=1e-12)
    assert layers[0] < layers[1] < layers[2]
    # Equal thresholds: -ln(1 - s_l) c_l is the same for all.
    thresholds = -np.log1p(-layers) * scale
    assert thresholds == pytest.approx([thresholds[0]] * 3)
    assert GradualPruning().layer_sparsity(0.0, scale).tolist() == [0, 0, 0]
    assert GradualPruning().layer_sparsity(1.0, scale).tolist() == [1, 1, 1]


def test_pruned_layers_take_the_time_of_their_non_zeros():
    scenario = GradualPruning(
        begin=0.2, end=0.6, num_steps=2, depth_trend=0, scale_spread=0, sparse_overhead=2.0,
        sparse_bytes=1.5,
    )  # fmt: skip
    trace = scenario.trace(MODEL, 10)
    # Steps at rows 2, 4 and 6 to sparsity 0, 0.7875 and 0.9; the core (1/4) stays dense.
    dense, middle, last = 10.0, 10 * (0.25 + 0.75 * 2 * 0.2125), 10 * (0.25 + 0.75 * 2 * 0.1)
    assert trace.forward_ms[:, 0] == pytest.approx([dense] * 4 + [middle] * 2 + [last] * 4)
    assert trace.backward_ms == pytest.approx(2 * trace.forward_ms)
    assert trace.memory_bytes[-1] == pytest.approx(MODEL.layer_bytes * 1.5 * 0.1)
    assert trace.memory_bytes[0] == pytest.approx(MODEL.layer_bytes)
    assert trace.announced == (2, 4, 6)


def test_the_last_pruning_step_is_taken_even_when_it_falls_on_the_end_of_the_run():
    trace = GradualPruning(begin=0.5, end=1.0, depth_trend=0, scale_spread=0).trace(MODEL, 7)
    assert trace.memory_bytes[-1] == pytest.approx(MODEL.layer_bytes * 1.2 * 0.1)


# ---------------------------------------------------------------- freezing


def test_a_frozen_front_has_no_backward_and_no_optimizer():
    scenario = LayerFreezing(final_fraction=0.5, begin=0.0, end=0.8, num_steps=4)
    assert [scenario.frozen_after(k, 8) for k in range(5)] == [0, 1, 2, 3, 4]
    trace = scenario.trace(MODEL, 10)
    front = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert (trace.backward_ms == 0).sum(axis=1).tolist() == front
    assert trace.backward_ms[4].tolist() == [0, 0, *[20.0] * 6]
    assert (trace.forward_ms == 10).all()
    assert trace.memory_bytes[-1, 0] == pytest.approx(12 * 16**2 * 2)
    assert trace.memory_bytes[-1, 7] == MODEL.layer_bytes


# ---------------------------------------------------------------- sparse attention


def test_density_is_the_chance_to_share_a_bucket():
    scenario = SparseAttention(num_buckets=16)
    assert scenario.density(np.array([0.0]))[0] == 1 / 16
    assert scenario.density(np.array([1.0]))[0] == pytest.approx(math.e / 16)
    assert scenario.density(np.array([3.0]))[0] == 1.0
    # The equation is the expectation of the sum of p_b^2 for log-normal sizes.
    rng = np.random.default_rng(0)
    sizes = np.exp(0.5 * rng.standard_normal((4000, 512)))
    share = sizes / sizes.sum(axis=1, keepdims=True)
    wide = SparseAttention(num_buckets=512)
    assert np.square(share).sum(axis=1).mean() == pytest.approx(
        wide.density(np.array([0.5]))[0], rel=0.01
    )


def test_only_the_core_of_attention_shrinks():
    scenario = SparseAttention(first_spread=0, last_spread=0, drift=0, overhead=2.0)
    trace = scenario.trace(MODEL, 3)
    assert trace.forward_ms == pytest.approx(10 * (0.75 + 0.25 * 2 / 16))


# ---------------------------------------------------------------- early exit


def test_survival_by_hand():
    scenario = EarlyExit(first_exit=0.2, final_survival=0.01)
    depth = np.array([0.0, 0.2, 0.6, 1.0])
    assert scenario.survival(depth, np.array(1.0)) == pytest.approx([1.0, 1.0, 0.1, 0.01])
    assert scenario.survival(depth, np.array(0.0)).tolist() == [1, 1, 1, 1]


def test_exited_tokens_still_fill_in_keys_and_values():
    scenario = EarlyExit(first_exit=0.0, final_survival=0.25, begin=0.0, end=0.5, noise=0.0)
    trace = scenario.trace(MODEL, 11)
    assert trace.forward_ms[0] == pytest.approx([10.0] * 8)
    assert trace.forward_ms[-1, -1] == pytest.approx(10 * (0.25 + 0.75 / 8))
    assert trace.forward_ms[-1].tolist() == sorted(trace.forward_ms[-1], reverse=True)


# ---------------------------------------------------------------- MoD and MoE


def test_mixture_of_depths_thins_every_other_block():
    trace = MixtureOfDepths(capacity=0.125, drift=0, warm_up=0.0, router_share=0.01).trace(MODEL, 4)
    assert trace.forward_ms[0] == pytest.approx([10, 1.35] * 4)
    warm = MixtureOfDepths(capacity=0.5, drift=0, warm_up=1.0, router_share=0).trace(MODEL, 3)
    assert warm.forward_ms[:, 1] == pytest.approx([10, 7.5, 5])


def test_the_busiest_rank_sets_the_time_of_the_experts():
    scenario = ExpertRouting(num_experts=4, expert_parallel=2)
    assert scenario.busiest(np.zeros(4)) == pytest.approx(1.0)
    # Shares 1/2, 1/4, 1/8, 1/8: the first rank has 3/4 of the tokens, 1.5 times its part.
    assert scenario.busiest(np.log([4.0, 2.0, 1.0, 1.0])) == pytest.approx(1.5)
    balanced = ExpertRouting(skew=0.0).trace(MODEL, 4)
    assert balanced.forward_ms == pytest.approx(np.full((4, 8), 10.0))
    trace = ExpertRouting(every=2, update_every=5).trace(MODEL, 12)
    assert (trace.forward_ms[:, 0::2] == 10).all()
    assert (trace.forward_ms[:, 1::2] > 10).all()
    assert trace.segment.tolist() == [0] * 5 + [1] * 5 + [2] * 2


# ---------------------------------------------------------------- building blocks


def test_steps_and_ramps():
    assert steps_done(10, 0.2, 0.6, 2).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert changes(steps_done(10, 0.2, 0.6, 2)) == (2, 4, 6)
    assert changes(steps_done(10, 0.0, 0.5, 1)) == (5,)
    assert steps_done(4, 1.0, 1.0, 3).tolist() == [0, 0, 0, 4]
    assert ramp(5, 0.25, 0.75).tolist() == [0, 0, 0.5, 1, 1]
    assert ramp(3, 0.5, 0.5).tolist() == [0, 1, 1]
    assert ramp(1, 0.0, 1.0).tolist() == [0]


def test_drift_keeps_its_spread_and_forgets_at_the_stated_pace():
    walk = drift(400, 2000, correlation=20.0, seed=1)
    assert walk.std(axis=1) == pytest.approx(np.ones(400), abs=0.1)
    later = (walk[:-20] * walk[20:]).mean()
    assert later == pytest.approx(math.exp(-1), abs=0.03)


# ---------------------------------------------------------------- settings from text


def test_settings_are_read_and_checked():
    assert make_scenario("pruning", {"final_sparsity": "0.95", "num_steps": "2"}) == (
        GradualPruning(final_sparsity=0.95, num_steps=2)
    )


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("prunning", {}, "did you mean pruning"),
        ("pruning", {"finalsparsity": "1"}, "did you mean final_sparsity"),
        ("pruning", {"num_steps": "2.5"}, "must be a whole number"),
        ("pruning", {"final_sparsity": "many"}, "must be a number"),
        ("pruning", {"final_sparsity": "1.2"}, "at least 0 and at most 1"),
        ("pruning", {"begin": "0.8"}, "begin 0.8 is after end 0.7"),
        ("early-exit", {"final_survival": "0"}, "above 0"),
        ("moe", {"correlation": "nan"}, "must be at least 0"),
        ("moe", {"every": "0"}, "at least 1"),
    ],
)
def test_wrong_settings_say_what_to_change(name, settings, words):
    with pytest.raises(ConfigError, match=words):
        make_scenario(name, settings)


def test_experts_must_divide_over_their_ranks():
    with pytest.raises(ConfigError, match="12 experts do not divide over 8 ranks"):
        ExpertRouting(num_experts=12).trace(MODEL, 2)


def test_a_model_must_be_possible():
    with pytest.raises(ConfigError, match="hidden is 0"):
        TransformerModel(4, hidden=0)

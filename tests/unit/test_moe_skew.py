"""The workloads of skewed routing."""

import pytest
import torch

from megatron_dynmo.dynamics.moe.skew import expert_weights, logit_bias, noise_seed
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.moe import SkewSpec

EXPERTS, LAYERS = 8, 4


def weights(text, layer_number=1, iteration=1):
    spec = SkewSpec.parse(text)
    found = expert_weights(spec, EXPERTS, layer_number, LAYERS, iteration)
    assert found.sum() == pytest.approx(1) and (found >= 0).all()
    return found


def uneven(found):
    return float(found.max() / found.mean())


def test_zipf_is_a_power_law_whose_first_expert_is_another_one_in_every_layer():
    found = weights("zipf:exponent=2")
    assert (found[0] / found[3]).item() == pytest.approx(16)
    assert [int(weights("zipf", layer).argmax()) for layer in (1, 2, 3)] == [0, 1, 2]
    assert uneven(weights("uniform")) == 1


def test_hot_experts_drift_by_one_a_period_and_take_their_share():
    text = "drift:hot=2,share=0.6,period=5"
    hot = [weights(text, 1, i).topk(2).indices.sort().values.tolist() for i in (1, 5, 6, 36)]
    assert hot == [[0, 1], [0, 1], [1, 2], [0, 7]]
    assert weights(text)[:2].sum().item() == pytest.approx(0.6 + 0.4 * 2 / EXPERTS)


def test_phases_run_through_the_layers():
    text = "phases:period=20,exponent=1.5"
    assert uneven(weights(text, 1, 1)) == pytest.approx(1)
    assert uneven(weights(text, 1, 11)) == pytest.approx(uneven(weights("zipf:exponent=1.5")))
    # Layer 3 of 4 is half a period ahead.
    assert uneven(weights(text, 3, 1)) == pytest.approx(uneven(weights(text, 1, 11)))
    assert weights(text, 2, 7).tolist() == weights(text, 2, 27).tolist()


def test_the_expert_with_the_highest_logit_is_drawn_by_weight():
    wanted = weights("zipf")
    bias = logit_bias(wanted, 20_000, noise_seed(1234, 2, 3))
    drawn = torch.bincount(bias.argmax(dim=1), minlength=EXPERTS) / 20_000
    torch.testing.assert_close(drawn.double(), wanted, atol=0.015, rtol=0)
    assert bias.isfinite().all()
    assert torch.equal(bias, logit_bias(wanted, 20_000, noise_seed(1234, 2, 3)))
    assert not torch.equal(bias, logit_bias(wanted, 20_000, noise_seed(1234, 3, 3)))
    assert not torch.equal(bias, logit_bias(wanted, 20_000, noise_seed(1234, 2, 4)))


def test_an_expert_that_nobody_wants_has_a_finite_bias():
    assert logit_bias(torch.tensor([1.0, 0.0]).double(), 100, 0).isfinite().all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zip", "use uniform, zipf, drift, phases"),
        ("zipf:period=3", "zipf has no setting 'period'; it has exponent"),
        ("uniform:x=1", "it has none"),
        ("drift:share=1.5", "at most 1"),
        ("drift:hot=1.5", "whole number above 0"),
        ("phases:period=-1", "a number above 0, got '-1'"),
        ("phases:period", "a number above 0"),
    ],
)
def test_mistakes_are_named(text, said):
    with pytest.raises(ConfigError, match=said):
        SkewSpec.parse(text)

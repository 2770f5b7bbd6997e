"""The rules by which layers freeze, the front they leave, and what they refuse."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_dynmo.adapters.frozen_front import FrozenFront
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.freezing.dynamic import Freezing
from megatron_dynmo.dynamics.freezing.reference import Reference
from megatron_dynmo.dynamics.freezing.rules import AutoFreeze, Egeria, Schedule
from megatron_dynmo.errors import ConfigError

ARGS = {
    "num_layers": 4,
    "untie_embeddings_and_output_weights": True,
    "no_load_optim": None,
    "optimizer": "adam",
    "recompute_granularity": None,
    "fp8": None,
    "fp4": None,
    "moe_router_load_balancing_type": "aux_loss",
}


def freezing(text="2:2", **args):
    config = DynMoConfig(freeze="schedule", freeze_schedule=text)
    return Freezing(config, Namespace(**{**ARGS, **args}))


def test_a_schedule_is_followed_also_after_a_skipped_iteration():
    rule = Schedule(DynMoConfig(freeze="schedule", freeze_schedule="2:1;5:3;9:0"), 4)
    wanted = [rule.decide(SimpleNamespace(iteration=i), 0) for i in (1, 2, 4, 6, 9)]
    assert wanted == [0, 1, 1, 3, 0]


@pytest.mark.parametrize(
    ("before", "now", "num_frozen", "expected"),
    [
        # Rates 0.01, 0.02, 0.5, 0.4: the lower median is 0.02, below which only layer 1 lies.
        ((1, 1, 1, 1), (0.99, 0.98, 0.5, 0.6), 0, 1),
        # The first trained layer changes most: none behind it may freeze before it.
        ((1, 1, 1, 1), (0.5, 0.99, 0.99, 0.99), 0, 0),
        # A layer that is frozen has no norm, and its rate does not count.
        ((0, 1, 1, 1), (0, 0.99, 0.5, 0.6), 1, 2),
        # The last layer stays.
        ((0, 0, 0, 1), (0, 0, 0, 1), 3, 3),
    ],
)
def test_autofreeze_goes_from_the_front_as_far_as_rates_are_low(before, now, num_frozen, expected):
    assert (
        AutoFreeze(DynMoConfig(freeze="autofreeze"), 4)._ripe(before, now, num_frozen) == expected
    )


def test_autofreeze_compares_means_of_unclipped_norms_over_whole_intervals(monkeypatch):
    from megatron_dynmo.dynamics.freezing import rules as freeze_rules

    norms = iter([[3.0, 1.0], [1.0, 1.0], [2.0, 1.0], [2.0, 9.0]])
    monkeypatch.setattr(freeze_rules, "gradient_norms", lambda stage, device: next(norms))
    rule = AutoFreeze(DynMoConfig(freeze="autofreeze", freeze_interval=2), 2)
    run = SimpleNamespace(stage=None, device=None, args=SimpleNamespace(clip_grad=0.0))
    found = []
    for iteration in (1, 2, 3, 4):
        # A checkpoint in the midst of an interval loses nothing.
        again = AutoFreeze(rule.config, 2)
        again.restore(rule.state())
        rule = again
        found.append(rule.decide(SimpleNamespace(iteration=iteration, grad_norm=1.0, run=run), 0))
    assert found == [0, 0, 0, 0] or found == [0, 0, 0, 1]
    assert rule.state()["before"] == [2.0, 5.0]
    assert freeze_rules._clip_share(4.0, 1.0) == pytest.approx(0.25)
    assert freeze_rules._clip_share(0.5, 1.0) == 1.0


@pytest.mark.parametrize(
    ("history", "is_settled"),
    [([4.0, 2.0, 1.0], False), ([1.0, 1.1, 0.9], True), ([1.0, 1.0], False), ([0, 0, 0], False)],
)
def test_egeria_waits_until_plasticity_is_level_over_the_window(history, is_settled):
    assert Egeria(DynMoConfig(freeze="egeria"), 4)._is_settled(history) == is_settled


def test_what_an_evaluation_saw_can_be_plotted():
    rule = Egeria(DynMoConfig(freeze="egeria"), 3)
    rule._history = [[1.0], [2.0, 2.0, 2.0], [4.0, 2.0, 0.0]]
    assert rule._numbers(1) == {
        "plasticity/layer_2": 2.0, "slope/layer_2": 0.0, "plasticity/layer_3": 0.0
    }  # fmt: skip
    auto = AutoFreeze(DynMoConfig(freeze="autofreeze"), 3)
    auto._ripe([1.0, 2.0, 4.0], [1.0, 1.0, 3.0], 1)
    assert auto.seen == {"rate/layer_2": 0.5, "rate/layer_3": 0.25, "rate_limit": 0.25}


def test_a_snapshot_lies_on_the_layer_as_saved_state_of_its_dtype():
    layer = torch.nn.Linear(3, 2).bfloat16()
    held = Reference.attach(layer)
    held.take(layer)
    assert [part.shape for part in held.parts(layer)] == [(2, 3), (2,)]
    assert torch.equal(held.parts(layer)[0], layer.weight)
    assert layer.state_dict()["dynmo_reference.weights"].dtype == torch.bfloat16
    Reference.drop(layer)
    assert "dynmo_reference.weights" not in layer.state_dict()


def test_the_front_is_dead_only_when_the_embedding_is_frozen():
    front = FrozenFront()
    assert not front.has_dead_input(1) and not front.is_dead(1)
    front.depth = 2
    assert [front.is_dead(n) for n in (1, 2, 3)] == [True, True, False]
    assert [front.has_dead_input(n) for n in (1, 3, 4)] == [True, True, False]


@pytest.mark.parametrize(
    ("depth", "held", "expected"),
    [
        (None, [1, 2], ["as it was"]),
        (2, [1, 2], ["dead"]),
        (1, [1, 2], ["begins here"]),
        (2, [3, 4], ["begins here"]),
        (1, [3, 4], ["as it was"]),
    ],
)
def test_a_checkpoint_is_in_the_graph_where_one_of_its_layers_is_trained(depth, held, expected):
    front = FrozenFront()
    front.depth = depth
    block = SimpleNamespace(
        layers=[SimpleNamespace(layer_number=n) for n in held],
        config=SimpleNamespace(recompute_num_layers=2, recompute_method="uniform"),
    )
    hidden = torch.ones(2)
    found = []
    with front.checkpointing(block), front.checkpoint(hidden) as given:
        with front.checkpoint(hidden) as inner:
            assert inner is hidden, "a checkpoint inside one is left alone"
        kind = "begins here" if given.requires_grad else "dead"
        found.append("as it was" if given is hidden else kind)
    assert found == expected


def test_factors_say_what_a_frozen_layer_costs():
    dynamic = freezing()
    dynamic._num_frozen = 2
    dynamic._look_at_front()
    assert [dynamic.factors(n).backward for n in (1, 2, 3)] == [0.0, 0.0, 1.0]
    tied = freezing(untie_embeddings_and_output_weights=False)
    tied._num_frozen = 2
    tied._look_at_front()
    assert [tied.factors(n).backward for n in (1, 2, 3)] == [0.5, 0.5, 1.0]


def test_state_goes_through_a_checkpoint_and_nothing_damaged_does():
    dynamic = freezing()
    dynamic._num_frozen, dynamic._steps, dynamic._begun = 2, 7.0, {3: 5.0}
    again = freezing()
    again.restore(dynamic.state())
    assert again.state() == dynamic.state()
    with pytest.raises(ConfigError, match="state in the checkpoint is damaged"):
        again.restore({"rule": "schedule"})
    with pytest.raises(ConfigError, match="saved with --dynmo-freeze egeria"):
        again.restore({**dynamic.state(), "rule": "egeria"})
    with pytest.raises(ConfigError, match="use the same --dynmo-freeze-embedding"):
        again.restore({**dynamic.state(), "embedding": False})


def test_references_need_experts_that_are_as_tensor_parallel_as_the_rest():
    config = DynMoConfig(freeze="egeria", mode="observe")
    args = {**ARGS, "num_experts": 4, "tensor_model_parallel_size": 2}
    assert Freezing.refusals(config, Namespace(**args)) == []
    (found,) = Freezing.refusals(config, Namespace(**args, expert_tensor_parallel_size=1))
    assert "--expert-tensor-parallel-size 1" in found


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"num_layers": 1}, "freezes layer 2 of 1"),
        ({"recompute_granularity": "full", "fp8": "hybrid"}, "use --recompute-granularity"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "use aux_loss"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(args, why):
    config = DynMoConfig(freeze="schedule", freeze_schedule="2:2", mode="observe")
    found = Freezing.refusals(config, Namespace(**{**ARGS, **args}))
    assert len(found) == 1 and why in found[0]
    assert Freezing.refusals(config, Namespace(**ARGS)) == []


def test_only_what_was_frozen_here_is_thawed():
    from megatron_dynmo.dynamics.freezing.dynamic import _switch_parameters

    ours, users = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    users.requires_grad_(False)
    for is_frozen in (True, False):
        _switch_parameters([ours, users], is_frozen)
        assert ours.requires_grad == (not is_frozen) and not users.requires_grad


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_final_norm_and_the_output_layer_stay_and_the_embedding_where_it_is_shared(is_tied):
    dynamic = freezing(untie_embeddings_and_output_weights=not is_tied)
    for num_frozen in (0, 1, 4):
        dynamic._num_frozen = num_frozen
        found = [dynamic._is_frozen(unit) for unit in (-1, 0, 1, 4)]
        assert found == [False, not is_tied and num_frozen > 0, num_frozen > 0, num_frozen > 3]


def test_the_step_that_a_checkpoint_holds_is_known_where_nothing_is_trained():
    dynamic = freezing()
    assert dynamic.optimizer_steps is None
    dynamic._steps = 7.0
    assert dynamic.optimizer_steps == 7.0
    dynamic.args.optimizer = "sgd"
    assert dynamic.optimizer_steps is None

"""What two dynamics on one layer must not do to each other, and what all ranks must know."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from megatron_dynmo.adapters.checkpoint import DYNAMICS
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.dynamics import Dynamics
from megatron_dynmo.dynamics.freezing.reference import Reference
from megatron_dynmo.dynamics.moe.dynamic import ExpertLoad
from megatron_dynmo.errors import ConfigError

ARGS = {
    "num_layers": 4,
    "seed": 1,
    "untie_embeddings_and_output_weights": True,
    "num_experts": 2,
    "moe_layer_freq": 1,
}
EGERIA_STATE = {"history": [[]] * 4, "has_references": True, "rate_at_freeze": None}


class _Layer(torch.nn.Module, BaseTransformerLayer):
    """As much of a transformer layer as shaping it needs."""

    is_mtp_layer = False

    def __init__(self, config, layer_number):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self.weight = torch.nn.Parameter(torch.ones(8))


def a_config():
    return SimpleNamespace(
        hidden_size=8, sequence_parallel=False, hetereogenous_dist_checkpoint=False
    )


def built(dynamics, config, number):
    spec = dynamics.wrap(_spec())
    return spec.module(config, number)


def _spec():
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=_Layer)


def of(freeze, num_frozen, **flags):
    """The dynamics of a run that has come so far."""
    dynamics = Dynamics(DynMoConfig(freeze=freeze, **flags), Namespace(**ARGS))
    freezing = next(iter(dynamics))
    freezing._num_frozen = num_frozen
    return dynamics, freezing


def test_a_frozen_layer_that_is_built_again_has_a_frozen_router():
    dynamics, _ = of("schedule", 2, freeze_schedule="1:2", mod=True)
    frozen, trained = (built(dynamics, a_config(), number) for number in (2, 4))
    assert not any(param.requires_grad for param in frozen.parameters())
    assert all(param.requires_grad for param in trained.parameters())
    assert len(list(frozen.parameters())) == len(list(trained.parameters())) == 2


def test_the_snapshot_of_a_layer_that_is_built_again_has_room_for_its_router():
    dynamics, freezing = of("egeria", 0, mod=True)
    freezing._rule.restore(EGERIA_STATE)
    layer = built(dynamics, a_config(), 2)
    assert len(Reference.of(layer).weights) == sum(p.numel() for p in layer.parameters()) == 16


def step_of(config, after):
    return SimpleNamespace(
        iteration=after,
        grad_norm=1.0,
        run=SimpleNamespace(
            stage=SimpleNamespace(chunks=[SimpleNamespace(block=SimpleNamespace(config=config))])
        ),
    )


def test_layers_are_stored_one_by_one_as_long_as_any_kind_needs_it(monkeypatch):
    from megatron_dynmo.dynamics.freezing.dynamic import Freezing

    monkeypatch.setattr(Freezing, "after_step", lambda self, step: None)
    config = a_config()
    dynamics, freezing = of("egeria", 0)
    built(dynamics, config, 2)
    assert not config.hetereogenous_dist_checkpoint
    freezing._rule.restore(EGERIA_STATE)  # the first snapshots were taken, nothing is frozen yet
    dynamics.after_step(step_of(config, 1))
    assert config.hetereogenous_dist_checkpoint

    dynamics, freezing = of("schedule", 2, freeze_schedule="1:2;2:0")
    config = a_config()
    built(dynamics, config, 2)
    assert config.hetereogenous_dist_checkpoint
    freezing._num_frozen = 0
    dynamics.after_step(step_of(config, 2))
    assert not config.hetereogenous_dist_checkpoint

    monkeypatch.setattr(
        "megatron_dynmo.dynamics.mixture_of_depths.dynamic.MixtureOfDepths.after_step",
        lambda *_: None,
    )
    dynamics, freezing = of("schedule", 2, freeze_schedule="1:2;2:0", mod=True)
    config = a_config()
    built(dynamics, config, 2)
    freezing._num_frozen = 0
    dynamics.after_step(step_of(config, 2))
    assert config.hetereogenous_dist_checkpoint  # routers are still in every second layer only


def test_a_rank_that_comes_back_knows_what_was_reported_last():
    """Whether ranks meet over an event follows from it: one that knew less would wait for ever."""
    load = {1: (1.5, 1.25), 2: (1.0, 1.0), 3: (2.0, 1.1), 4: (1.1, 1.0)}
    stayed, away = (ExpertLoad(DynMoConfig(moe=True), Namespace(**ARGS)) for _ in range(2))
    stayed._loads = stayed._reported = load
    text = Dynamics(DynMoConfig(moe=True), Namespace(**ARGS, **{DYNAMICS: None}))
    text._kinds = [stayed]
    text.remember()
    text._kinds = [away]
    text.restore()
    assert (away._loads, away._reported) == (load, load)
    away._loads = {**load, 2: (1.05, 1.0)}
    assert not any(away._is_news(number) for number in away._layers)
    with pytest.raises(ConfigError, match=r"MoE layers of this model are \[1, 2, 3, 4\]"):
        away.restore({"loads": {"5": [1, 1]}, "reported": {}})


def test_tokens_count_once_recomputed_or_not_with_a_graph_or_without():
    load = ExpertLoad(DynMoConfig(moe=True), Namespace(**ARGS))
    router = torch.nn.Linear(4, 2)
    router.register_forward_hook(
        lambda module, args, output: load._count(1, module, args, (output, output.new_ones(3, 2)))
    )

    def counted():
        row = load._counts.pop(1, None)
        return None if row is None else row.tolist()

    x = torch.ones(3, 4, requires_grad=True)
    router(x).sum().backward()
    assert counted() == [3, 3]
    with torch.no_grad():  # a layer of a frozen front
        router(x)
    assert counted() == [3, 3]

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return router(hidden)

        @staticmethod
        def backward(ctx, grad):
            router(x.detach())
            with torch.enable_grad():
                router(x.detach())
            return grad.new_ones(3, 4)

    Recomputed.apply(x).sum().backward()
    assert counted() == [3, 3]
    router.eval()(x)
    assert counted() is None


def test_a_checkpoint_is_evaluated_with_the_capacity_that_it_was_trained_to():
    from megatron_dynmo.dynamics.mixture_of_depths.dynamic import MixtureOfDepths

    args = Namespace(**ARGS, iteration=0)
    routed = MixtureOfDepths(DynMoConfig(mod=True, mod_capacity="1:1.0;50:0.25"), args)
    assert routed._capacity == 1.0
    args.iteration = 49  # loaded; --skip-train, so that no iteration begins
    assert routed._capacity == 0.25
    routed.begin_iteration(3)
    assert routed._capacity == 1.0


def test_tokens_leave_an_evaluated_checkpoint_as_they_left_it_in_training():
    from megatron_dynmo.dynamics.early_exit.dynamic import EarlyExit

    sizes = {"hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "kv_channels": 4}
    more = {"group_query_attention": False, "num_query_groups": None, "seq_length": 8}
    args = Namespace(**{**ARGS, "num_experts": None}, **sizes, **more, swiglu=False, iteration=0)
    args.transformer_impl = "local"
    config = DynMoConfig(early_exit="saturation", early_exit_threshold="1:0.5;50:0.9")
    leaving = EarlyExit(config, args)
    args.iteration = 49
    assert leaving._threshold == 0.9
    leaving.begin_iteration(1)
    assert leaving._threshold == 0.5


def test_exit_heads_of_other_settings_are_refused_by_their_flags():
    from megatron_dynmo.dynamics.early_exit.dynamic import EarlyExit

    sizes = {"hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "kv_channels": 4}
    more = {"group_query_attention": False, "num_query_groups": None, "seq_length": 8}
    args = Namespace(**{**ARGS, "num_experts": None}, **sizes, **more, swiglu=False, iteration=0)
    args.transformer_impl = "local"
    saved = EarlyExit(DynMoConfig(early_exit="confidence", early_exit_classes=32), args).state()
    EarlyExit(DynMoConfig(early_exit="confidence", early_exit_classes=32), args).restore(saved)
    for other in ({"early_exit_classes": 64}, {"early_exit_classes": 32, "early_exit_every": 2}):
        with pytest.raises(ConfigError, match="confidence --dynmo-early-exit-classes 32"):
            EarlyExit(DynMoConfig(early_exit="confidence", **other), args).restore(saved)
    with pytest.raises(ConfigError, match="this run's of saturation;"):
        EarlyExit(DynMoConfig(early_exit="saturation"), args).restore(saved)
    del saved["heads"]  # of a checkpoint from before they were noted
    EarlyExit(DynMoConfig(early_exit="confidence"), args).restore(saved)


def test_documents_within_a_sequence_are_refused_beside_mixture_of_depths():
    from megatron_dynmo.dynamics.mixture_of_depths.dynamic import MixtureOfDepths
    from megatron_dynmo.dynamics.mixture_of_depths.routed_layer import token_multiple

    plain = {"context_parallel_size": 1, "multi_latent_attention": False, "num_layers": 4}
    plain |= {"position_embedding_type": "learned_absolute"}
    config = DynMoConfig(mod=True)
    assert MixtureOfDepths.refusals(config, Namespace(**plain)) == []
    for name in ("dataloader_inter_document_masking", "sequence_packing_scheduler"):
        (found,) = MixtureOfDepths.refusals(config, Namespace(**plain, **{name: True}))
        assert found.startswith("--" + name.replace("_", "-"))
    assert token_multiple(2, None) == 2 and token_multiple(2, "hybrid") == 32

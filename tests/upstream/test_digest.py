"""What the digest of a unit is taken of."""

from types import SimpleNamespace

import torch

from megatron_dynmo.adapters import digest


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("tokens", torch.zeros(2), persistent=False)


def units(layer: Router, outside: Router) -> dict[str, list[str]]:
    core = torch.nn.ModuleDict({"layer": layer, "mtp": outside})
    stage = SimpleNamespace(
        layers=lambda: {3: layer},
        chunks=[SimpleNamespace(core=core)],
        parameters_outside_layers=lambda: [("mtp.weight", outside.weight)],
    )
    return {unit: [name for name, _ in named] for unit, named in digest._units(stage)}


def test_buffers_that_a_checkpoint_holds_belong_to_their_unit():
    assert units(Router(), Router()) == {
        "3": ["expert_bias", "weight"],
        "output": ["mtp.expert_bias", "mtp.weight"],
    }


def test_a_changed_buffer_changes_the_digest():
    layer, codec = Router(), SimpleNamespace(is_sharded=lambda p: False, capture=lambda p: None)
    named = [*layer.named_parameters(), *digest._persistent_buffers(layer)]
    before = digest._hash(named, codec)
    assert digest._hash(named, codec) == before
    layer.expert_bias[1] = 1e-3
    assert digest._hash(named, codec) != before

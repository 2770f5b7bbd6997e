"""The digest holds what training changes, buffers too."""

import torch

from megatron_dynmo.adapters.digest import hash_unit
from megatron_dynmo.adapters.layer_state import saved_buffers


class NoState:
    """An optimizer's codec that knows no parameter."""

    moment_keys = ()

    def capture(self, param):
        return None

    def is_sharded(self, param):
        return False


def test_an_expert_bias_is_part_of_the_digest_and_a_counter_is_not():
    layer = torch.nn.Module()
    layer.router = torch.nn.Linear(2, 2)
    layer.router.register_buffer("expert_bias", torch.zeros(2))
    layer.router.register_buffer("local_tokens", torch.zeros(2), persistent=False)

    def digest():
        return hash_unit([*layer.named_parameters(), *saved_buffers(layer)], NoState())

    assert [name for name, _ in saved_buffers(layer)] == ["router.expert_bias"]
    before = digest()
    layer.router.local_tokens += 1
    assert digest() == before
    layer.router.expert_bias += 1
    assert digest() != before

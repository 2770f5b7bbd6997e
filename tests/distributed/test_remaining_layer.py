"""A Megatron layer run on some of its tokens equals the layer run on all of them, for those."""

from typing import Any, NamedTuple

import pytest

from tests.ranks import run_ranks

LENGTH, BATCH, HIDDEN = 12, 3, 16


class Case(NamedTuple):
    """One layer and the tokens that have left it.

    Attributes:
        name: what a failure names.
        is_llama: rotary embeddings, grouped queries, gated MLP, RMSNorm, no biases; else GPT-2's.
        sequence_parallel: whether each rank holds a part of the sequence.
        left: by sample, 1 for each token that has left.
        split: whether queries may be projected by rows of the fused weight.
    """

    name: str
    is_llama: bool
    sequence_parallel: bool
    left: tuple[str, ...]
    split: bool = True


UNEVEN = ("010011010110", "000000000000", "111110111111")
SECOND_HALF_STAYS = ("111111010110", "111111111110", "111111111111")
CASES = {
    1: (
        Case("learned positions", False, False, UNEVEN),
        Case("rotary, grouped queries, gated", True, False, UNEVEN),
        Case("projection as a whole", True, False, UNEVEN, split=False),
    ),
    2: (
        Case("TP 2", True, False, UNEVEN),
        Case("sequence parallel", False, True, UNEVEN),
        Case("a rank without remaining tokens", True, True, SECOND_HALF_STAYS),
        Case("sequence parallel, projection as a whole", True, True, UNEVEN, split=False),
    ),
}
LLAMA = {
    **{"num_query_groups": 2, "gated_linear_unit": True, "add_bias_linear": False},
    **{"normalization": "RMSNorm"},
}


def differences(rank: int, world_size: int) -> dict[str, list[float]]:
    """Largest differences of output, input gradient and parameter gradients, by case."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_dynmo.cpu import cpu_specs
    from megatron_dynmo.patching import patched

    with patched(cpu_specs()):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        model_parallel_cuda_manual_seed(1)
        return {case.name: _differences(rank, world_size, case) for case in CASES[world_size]}


def _differences(rank: int, world_size: int, case: Case) -> list[float]:
    import torch

    from megatron_dynmo.dynamics.early_exit import remaining_layer
    from megatron_dynmo.dynamics.early_exit.exiting import Remaining

    torch.manual_seed(1)
    layer, kwargs = _layer(world_size, case)
    remaining_layer._can_split = lambda attention: case.split
    left = torch.tensor([[bool(int(token)) for token in row] for row in case.left]).t()
    parts = world_size if case.sequence_parallel else 1
    part = rank if case.sequence_parallel else 0
    whole = torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.float64)
    weights = torch.randn_like(whole)

    def run(on_some: bool) -> list[Any]:
        hidden = whole.chunk(parts)[part].clone().requires_grad_()
        if on_some:
            remaining = Remaining.of(left, part, parts)
            computed = remaining_layer.run_remaining(layer, hidden, remaining, **kwargs)
            output = remaining.place(hidden, computed)
        else:
            full, _ = layer(hidden_states=hidden, **kwargs)
            output = torch.where(left.chunk(parts)[part][..., None], hidden, full)
        layer.zero_grad()
        (output * weights.chunk(parts)[part]).sum().backward()
        grads = [p.grad.clone() for p in layer.parameters()]
        return [output.detach(), hidden.grad, *grads]

    return [float((a - b).abs().max()) for a, b in zip(run(True), run(False), strict=True)]


def _layer(world_size: int, case: Case) -> tuple[Any, dict[str, Any]]:
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **{"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4},
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True},
        **{"params_dtype": torch.float64, "tensor_model_parallel_size": world_size},
        **{"sequence_parallel": case.sequence_parallel, "ffn_hidden_size": 32},
        **{"gradient_accumulation_fusion": False, **(LLAMA if case.is_llama else {})},
    )
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    layer = build_module(spec, config=config, layer_number=2).double()
    for parameter in layer.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    angles = RotaryEmbedding(HIDDEN // 4, 1.0, use_cpu_initialization=True)(LENGTH)
    return layer, {"rotary_pos_emb": angles if case.is_llama else None, "attention_mask": None}


@pytest.mark.parametrize("ranks", CASES)
def test_the_remaining_tokens_come_out_as_from_the_whole_layer(ranks):
    for by_case in run_ranks(differences, ranks):
        for name, found in by_case.items():
            assert max(found) < 1e-9, (name, found)

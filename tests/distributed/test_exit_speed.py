"""What a layer saves when tokens have left, on one core.

The table of docs/dynamics/early-exit.md: pytest -s -m matrix tests/distributed/test_exit_speed.py
"""

import statistics
import time

import pytest

from tests.ranks import run_ranks

LENGTH, BATCH, HIDDEN, ROUNDS = 1024, 1, 256, 9
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)


def times(rank, world_size):
    """Milliseconds (forward, backward) of the stock layer and, by share, of the remaining rest."""
    from megatron_dynmo.cpu import cpu_specs
    from megatron_dynmo.patching import patched

    with patched(cpu_specs()):
        return _times()


def _times():
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_dynmo.dynamics.early_exit.exiting import Remaining
    from megatron_dynmo.dynamics.early_exit.remaining_layer import run_remaining

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        **{"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4},
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True},
        **{"gradient_accumulation_fusion": False},
    )
    layer = build_module(get_gpt_layer_local_spec(), config=config, layer_number=2)
    inputs, gradient = torch.randn(2, LENGTH, BATCH, HIDDEN)
    drawn = torch.rand(LENGTH, BATCH)

    def once(share):
        hidden = inputs.clone().requires_grad_()
        start = time.perf_counter()
        if share is None:
            output, _ = layer(hidden_states=hidden, attention_mask=None)
        else:
            remaining = Remaining.of(drawn < share)
            output = remaining.place(hidden, run_remaining(layer, hidden, remaining))
        middle = time.perf_counter()
        output.backward(gradient)
        end = time.perf_counter()
        layer.zero_grad()
        return 1e3 * (middle - start), 1e3 * (end - middle)

    cases = (None, *SHARES)
    for case in cases:
        once(case)
    rounds = [[once(case) for case in cases] for _ in range(ROUNDS)]
    return list(zip(*rounds, strict=True))


@pytest.mark.matrix
def test_a_layer_that_three_quarters_of_the_tokens_have_left_is_twice_as_fast():
    ((stock, *by_share),) = run_ranks(times, 1)
    ratios = {}
    for share, rows in zip(SHARES, by_share, strict=True):
        pairs = zip(stock, rows, strict=True)
        ratios[share] = statistics.median(sum(dense) / sum(rest) for dense, rest in pairs)
        forward, backward = (statistics.median(part) for part in zip(*rows, strict=True))
        print(f"left {share:.0%}: {forward:.1f} + {backward:.1f} ms, {ratios[share]:.2f}x")
    forward, backward = (statistics.median(part) for part in zip(*stock, strict=True))
    print(f"stock layer: {forward:.1f} + {backward:.1f} ms")
    assert ratios[0.75] >= 2
    assert sorted(ratios.values()) == list(ratios.values())

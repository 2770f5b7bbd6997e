"""Mixture of Depths on real Megatron layers."""

import pytest

from tests.e2e.matrix import LLAMA
from tests.e2e.moving import answers, train_ours
from tests.ranks import run_ranks

MOD = ("--dynmo-mod", "--dynmo-mod-routing", "threshold", "--dynmo-mod-capacity", "0.25")
TOKENS = 32


def see_layers(step, model, optimizer):
    """What layers did in this step, and whether evaluation looks ahead."""
    import torch

    from megatron_dynmo.adapters.model import chunks_of

    core = chunks_of(model)[0].core
    layers = {layer.layer_number: layer for layer in core.decoder.layers}
    seen = {
        "routed": [n for n, layer in layers.items() if hasattr(layer, "mod_router")],
        "gradients": {
            f"{n}.{name}": float(p.main_grad.norm())
            for n, layer in layers.items()
            for name, p in layer.named_parameters()
            if name.startswith("mod_")
        },
        "router": [
            layer.mod_router.weight.flatten().tolist()
            for layer in layers.values()
            if hasattr(layer, "mod_router")
        ],
    }
    if step == 1:
        core.passed_by = []
        for n in seen["routed"]:
            layers[n].register_forward_hook(_note_passed, with_kwargs=True)
    else:
        seen["passed_by"], core.passed_by[:] = list(core.passed_by), []
    for layer in layers.values():
        layer.noted_by = core.passed_by
    if step == 3 and torch.distributed.get_world_size() == 1:
        seen["looks_ahead"], seen["shares"] = _look_ahead(core, layers)
    return seen


def _note_passed(layer, args, kwargs, output):
    """Note how many tokens of each sample come out of a layer as they went in."""
    import torch

    before, after = kwargs["hidden_states"].view(torch.int32), output[0].view(torch.int32)
    layer.noted_by.append((before == after).all(dim=-1).sum(dim=0).tolist())


def _look_ahead(core, layers):
    """Whether a changed token changes the logits of one before it, in evaluation."""
    import torch

    tokens = torch.arange(TOKENS).remainder(101).expand(2, TOKENS).contiguous()
    places = torch.arange(TOKENS).expand(2, TOKENS)
    mask = torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
    core.eval()
    core.passed_by.clear()
    with torch.no_grad():
        plain = core(tokens, places, mask).clone()
        shares = [1 - passed / TOKENS for row in core.passed_by for passed in row]
        found = []
        for place in (1, 9, 20, TOKENS - 1):
            changed = tokens.clone()
            changed[:, place] = 77
            logits = core(changed, places, mask)
            # By a tolerance: matrix products of another height round in another way.
            found.append(float((logits - plain)[:, :place].abs().max()) > 1e-5)
            assert (logits - plain)[:, place:].abs().max() > 1e-4
    core.train()
    core.passed_by.clear()
    return found, shares


def test_routers_learn_skipped_tokens_keep_their_bits_and_evaluation_does_not_look_ahead():
    (result,) = run_ranks(train_ours, 1, see_layers, None, *MOD, *LLAMA, "--micro-batch-size", "2")
    for step in result["watched"]:
        assert step["routed"] == [2, 4]
        assert len(step["gradients"]) == 2 * 4
        assert all(0 < norm < float("inf") for norm in step["gradients"].values()), step
    # 2 routed layers, 2 micro-batches of 2 samples; a quarter of the tokens goes through.
    for step in result["watched"][1:]:
        assert step["passed_by"] == [[TOKENS * 3 // 4] * 2] * 4
    ahead = result["watched"][2]
    assert ahead["looks_ahead"] == [False] * 4
    assert 0 < sum(ahead["shares"]) < len(ahead["shares"])


def test_expert_choice_looks_ahead_in_evaluation():
    # So that the test above is known to see it.
    (result,) = run_ranks(train_ours, 1, see_layers, None, "--dynmo-mod", *LLAMA)
    assert any(result["watched"][2]["looks_ahead"])


@pytest.mark.matrix
def test_all_tokens_without_weights_are_the_plain_model_bit_for_bit():
    all_tokens = ("--dynmo-mod", "--dynmo-mod-capacity", "1.0", "--dynmo-mod-weighting", "none")
    plain, routed = (
        run_ranks(train_ours, 1, None, None, "--clip-grad", "1.0", *flags)[0]
        for flags in ((), all_tokens)
    )
    assert plain["losses"] == routed["losses"]
    assert plain["grad_norms"] == routed["grad_norms"]
    assert plain["parameters"] == routed["parameters"] and plain["moments"] == routed["moments"]


@pytest.mark.matrix
def test_tensor_parallel_ranks_choose_alike_with_whole_sequences_and_with_parts():
    words = (*MOD, *LLAMA, "--micro-batch-size", "2", "--tensor-model-parallel-size", "2")
    whole, parts = (
        run_ranks(train_ours, 2, see_layers, None, *words, *flags)
        for flags in ((), ("--sequence-parallel",))
    )
    for one, other in (whole, parts):
        for step, same in zip(one["watched"], other["watched"], strict=True):
            assert step["router"] == same["router"] and step["gradients"] == same["gradients"]
    # A rank with a part of each sequence has a part of the gradient.
    wanted = whole[0]["watched"][0]["gradients"]
    assert parts[0]["watched"][0]["gradients"] == pytest.approx(wanted, rel=1e-3)
    losses = [[float.fromhex(s["lm loss"]) for s in r[0]["losses"]] for r in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.matrix
def test_what_cannot_be_routed_is_refused_with_the_reason():
    refused = [
        (("--dynmo-mod-every", "5"), "routes no layer of 4"),
        (("--dynmo-mod-capacity", "0"), "share above 0"),
        (("--dynmo-mod-capacity", "5:0.5"), "from iteration 1 on"),
        (("--context-parallel-size", "2"), "--context-parallel-size"),
        (("--window-size", "8,0"), "--window-size"),
    ]
    lines = [("--dynmo-mod", *flags) for flags, _ in refused]
    # The last one trains: the answers before it left nothing behind.
    *found, (status, _) = run_ranks(answers, 1, [*lines, ("--dynmo-mod",)])[0]
    assert status is None
    for (status, said), (_, wanted) in zip(found, refused, strict=True):
        assert status == 2 and wanted in said, said


def time_layers(step, model, optimizer):
    """CPU time in ms of forward and backward of layer 1, which gets all tokens, and of layer 2."""
    import time

    import torch

    from megatron_dynmo.adapters.model import chunks_of

    layers = chunks_of(model)[0].layers
    mask = torch.ones(1, 1, 1024, 1024).triu(1).bool()
    times = [[], []]
    for _ in range(9):
        for layer, found in zip(layers, times, strict=True):
            hidden = torch.randn(1024, 1, 256, requires_grad=True)
            start = time.process_time()
            output, _ = layer(hidden_states=hidden, attention_mask=mask)
            output.backward(torch.ones_like(output))
            found.append(1e3 * (time.process_time() - start))
    return [sorted(found)[len(found) // 2] for found in times]


@pytest.mark.matrix
def test_a_layer_with_an_eighth_of_the_tokens_is_three_times_as_fast():
    size = (
        *("--num-layers", "2", "--hidden-size", "256", "--ffn-hidden-size", "1024"),
        *("--seq-length", "1024", "--max-position-embeddings", "1024", "--train-iters", "1"),
    )
    (result,) = run_ranks(train_ours, 1, time_layers, None, "--dynmo-mod", *size)
    ((whole_ms, routed_ms),) = result["watched"]
    print(f"all tokens {whole_ms:.1f} ms, an eighth {routed_ms:.1f} ms")
    assert whole_ms > 3 * routed_ms

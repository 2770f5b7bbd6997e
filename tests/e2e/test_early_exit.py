"""Early exit in real training runs: its two limits, and who leaves under other layouts."""

import hashlib
import types

import pytest

from tests.e2e.moving import train_ours
from tests.ranks import run_ranks

FIRST_EXIT = 2
FLAGS = ("--dynmo-early-exit-min-layer", str(FIRST_EXIT))
CLASSES = ("--dynmo-early-exit-classes", "32")
# The vocabulary is padded to a multiple of 128 for each rank, unless it is told to be as large.
TP = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64")


def limits(step, model, optimizer):
    """Losses of one batch: nobody or everybody leaves, and stock Megatron whole or cut short."""
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_dynmo.adapters.model import chunks_of
    from megatron_dynmo.flags.early_exit import parse_schedule

    (chunk,) = chunks_of(model)
    (kind,) = chunk.layers[0].dynmo_dynamics
    torch.manual_seed(0)
    tokens = torch.randint(0, 127, (2, 32))
    batch = (tokens, torch.arange(32).expand(2, -1), None)

    def loss(threshold, layers, is_stock=False):
        kind._schedule = parse_schedule(threshold, "")
        whole = chunk.block.layers
        chunk.block.layers = torch.nn.ModuleList(list(whole)[:layers])
        for layer in whole:
            if is_stock:
                layer.forward = types.MethodType(TransformerLayer.forward, layer)
        with torch.no_grad():
            found = chunk.core(*batch, labels=tokens.roll(-1, 1))
        chunk.block.layers = whole
        for layer in whole:
            layer.__dict__.pop("forward", None)
        return found.double().sum().item().hex()

    return {
        "all leave": loss("0", 4),
        "shallow": loss("0", FIRST_EXIT, is_stock=True),
        "none leaves": loss("inf", 4),
        "whole": loss("0", 4, is_stock=True),
    }


@pytest.mark.parametrize("kind", ["confidence", "saturation"])
def test_threshold_0_is_the_shallow_model_and_infinity_the_whole_one(kind):
    (found,) = run_ranks(
        *(train_ours, 1, limits, None, *FLAGS, *(CLASSES if kind == "confidence" else ())),
        *("--dynmo-early-exit", kind, "--train-iters", "2", "--clip-grad", "1.0"),
    )
    for watched in found["watched"]:
        assert watched["all leave"] == watched["shallow"]
        assert watched["none leaves"] == watched["whole"]
        assert watched["shallow"] != watched["whole"]


_decisions = []


def record(rank):
    """Keep a digest of who has left after each layer with an exit, as this rank decided it."""
    from megatron_dynmo.dynamics.early_exit.dynamic import EarlyExit

    decide = EarlyExit._exit

    def recorded(self, layer, before, after, columns):
        after, columns = decide(self, layer, before, after, columns)
        left = columns[..., 0]
        digest = hashlib.sha256(left.contiguous().numpy().tobytes()).hexdigest()[:12]
        _decisions.append((layer.layer_number, int(left.sum()), digest))
        return after, columns

    EarlyExit._exit = recorded


def decisions(step, model, optimizer):
    """Take what was recorded in a step."""
    found = list(_decisions)
    _decisions.clear()
    return found


def who_leaves(ranks, *flags):
    """Decisions by step and layer, in order of micro-batches, of one pipeline."""
    by_rank = run_ranks(
        *(train_ours, ranks, decisions, record, *FLAGS),
        *("--dynmo-early-exit", "saturation", "--dynmo-early-exit-min-layer", "1"),
        *("--dynmo-early-exit-threshold", "0.985", "--pipeline-model-parallel-size", "2"),
        *("--train-iters", "3", "--use-cpu-initialization", *flags),
    )
    steps = []
    for step in range(3):
        found = {}
        for rank in by_rank:
            for number, count, digest in rank["watched"][step]:
                found.setdefault(number, []).append((count, digest))
        steps.append(found)
    return steps


@pytest.mark.matrix
def test_the_same_tokens_leave_under_every_layout_and_with_tensor_parallelism():
    still = who_leaves(2)
    for step in still:
        assert any(0 < count < 32 for each in step.values() for count, _ in each)
    assert who_leaves(2, "--dynmo-force-layout", "1:E|ttttL;2:Ettt|tL") == still
    parallel = who_leaves(4, *TP)
    for step, wanted in zip(parallel, still, strict=True):
        # Both ranks of a tensor-parallel pair recorded what they hold.
        assert {number: sorted(each) for number, each in step.items()} == {
            number: sorted(each * 2) for number, each in wanted.items()
        }


def heads(step, model, optimizer):
    """Weights of the exit heads on this rank, by layer."""
    from megatron_dynmo.adapters.model import chunks_of

    (chunk,) = chunks_of(model)
    return {
        layer.layer_number: layer.exit_head.weight.detach().flatten().tolist()
        for layer in chunk.layers
        if hasattr(layer, "exit_head")
    }


@pytest.mark.matrix
@pytest.mark.parametrize("parallel", [(), ("--sequence-parallel",)], ids=["TP", "SP"])
def test_heads_learn_the_same_with_tensor_parallelism(parallel):
    # Plain SGD: with Adam a gradient that is a multiple of the right one would not show.
    flags = (
        *("--dynmo-early-exit", "confidence", "--dynmo-early-exit-loss-weight", "1", *CLASSES),
        *("--dynmo-early-exit-threshold", "2", "--use-cpu-initialization"),
        *("--optimizer", "sgd", "--lr", "0.5", "--train-iters", "3", "--micro-batch-size", "2"),
    )
    (alone,) = run_ranks(train_ours, 1, heads, None, *FLAGS, *flags)
    for rank in run_ranks(
        *(train_ours, 2, heads, None, *FLAGS, *flags, *TP),
        *parallel,
    ):
        for wanted, found in zip(alone["watched"], rank["watched"], strict=True):
            assert wanted.keys() == found.keys() == {2, 3}
            for number in wanted:
                assert found[number] == pytest.approx(wanted[number], abs=1e-6)
        assert max(map(abs, rank["watched"][-1][2])) > 1e-3

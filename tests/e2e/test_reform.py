"""Wrapper and optimizer rebuilt around changed parameters: what stays keeps its state."""

import pytest

from tests.e2e.moving import train_ours
from tests.ranks import run_ranks

SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--pipeline-model-parallel-size", "2"), marks=pytest.mark.matrix),
        pytest.param(("--pipeline-model-parallel-size", "2", "--bf16"), marks=pytest.mark.matrix),
        ("--bf16", *SHARDED),
        pytest.param(("--use-distributed-optimizer",), marks=pytest.mark.matrix),
        pytest.param(("--bf16", *SHARDED, "--dynmo-mode", "observe"), marks=pytest.mark.matrix),
    ],
    ids=["fp32", "bf16 masters", "bf16 sharded over 2", "fp32 sharded", "buckets over layers"],
)
def test_state_of_what_stays_is_kept(flags):
    for result in run_ranks(train_ours, 2, watch, None, *flags, "--train-iters", "6"):
        nothing, frozen, thawed, resized, *_ = result["watched"]
        assert nothing["before"] == nothing["after"]
        assert {"1"} == {unit for unit in frozen["before"] if differs(frozen, unit)}
        assert (frozen["released"] > 0) == (1 in frozen["holds"])
        assert thawed["steps"] in ([0.0], [])
        assert {"2"} == {unit for unit in resized["before"] if differs(resized, unit)}
        assert resized["is_cut"]
        assert resized["steps"] in ([1.0], []), "the thawed layer counts its own steps"


def differs(seen, unit):
    return seen["before"][unit] != seen["after"][unit]


def watch(iteration, model, optimizer):
    """After each of the first four steps make one reform and look at what it left."""
    from megatron_dynmo.patches.training import controller

    run = controller()._session._run
    stage = run.stage
    if iteration > 4:
        return None
    seen = {"before": run.digests(), "holds": sorted(stage.layers())}
    layers, found = stage.layers(), {}

    def change():
        if iteration in (2, 3) and 1 in layers:
            for param in layers[1].parameters():
                param.requires_grad_(iteration == 3)
        if iteration == 4 and 2 in layers:
            found.update(cut_neurons(layers[2].mlp))
        return found

    full = {} if iteration != 4 or 2 not in layers else states_of(layers[2].mlp, stage)
    seen["released"] = stage.reform(change).released_bytes
    seen["after"] = run.digests()
    seen["is_cut"] = all(
        bool((moment == convert(full[old][key])).all())
        for new, (old, convert) in found.items()
        for key, moment in state_of(new, stage).items()
    )
    seen["steps"] = sorted(
        {
            float(state.tensors["step"])
            for n, layer in layers.items()
            if n == 1
            for param in layer.parameters()
            if (state := stage.codec().capture(param)) is not None
        }
    )
    return seen


def cut_neurons(mlp):
    """Keep every second neuron, and say what became of what."""
    import torch

    def rows(tensor):
        return tensor[::2].contiguous()

    def columns(tensor):
        return tensor[:, ::2].contiguous()

    replaced = {}
    for module, name, convert in (
        (mlp.linear_fc1, "weight", rows),
        (mlp.linear_fc1, "bias", rows),
        (mlp.linear_fc2, "weight", columns),
    ):
        old = getattr(module, name)
        new = torch.nn.Parameter(convert(old.detach()))
        setattr(module, name, new)
        replaced[new] = (old, convert)
    return replaced


def states_of(mlp, stage):
    params = (mlp.linear_fc1.weight, mlp.linear_fc1.bias, mlp.linear_fc2.weight)
    return {param: state_of(param, stage) for param in params}


def state_of(param, stage):
    """Master copy and moments of a parameter, whole and in its shape."""
    import torch

    from megatron_dynmo.adapters.digest import _full_state

    found = {}
    for key, tensor in _full_state(param, stage.codec()):
        if tensor.numel() == param.numel():
            is_bits = tensor.dtype == torch.int32
            whole = tensor.view(torch.float32) if is_bits else tensor
            found[key] = whole.detach().view(param.shape).clone()
    assert found.keys() >= {"exp_avg", "exp_avg_sq"}
    return found

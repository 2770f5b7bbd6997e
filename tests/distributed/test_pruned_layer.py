"""A pruned layer computes what the dense layer does when what was removed is zero."""

from fractions import Fraction
from types import SimpleNamespace

import pytest

from tests.distributed.test_pruning_agreement import (
    FFN,
    HEADS,
    HIDDEN,
    arguments,
    build_layers,
    kept_units,
)
from tests.ranks import run_ranks

MATRICES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def compare(rank, world_size, kind, compute, gated):
    """Prune half of two layers, run the first and a masked copy of it forward and backward.

    Several ranks are tensor parallel with sequence parallelism.

    Returns:
        Largest difference of output, input gradient and weight gradients; weights before and after.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_dynmo.adapters.topology import Topology
    from megatron_dynmo.cpu import cpu_specs
    from megatron_dynmo.dynamics.pruning.magnitude import MagnitudePruning
    from megatron_dynmo.dynamics.pruning.units import UnitPruning
    from megatron_dynmo.patching import patched

    with patched(cpu_specs()):
        parallel_state.initialize_model_parallel(world_size)
        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        layers = build_layers(world_size, gated, sequence_parallel=world_size > 1)
        dense = build_layers(world_size, gated, sequence_parallel=world_size > 1)[1].eval()
        pruned = layers[1].eval()
        dense.load_state_dict(pruned.state_dict())
        run = SimpleNamespace(
            topology=Topology.of_this_rank(),
            stage=SimpleNamespace(layers=lambda: layers, config=pruned.config),
        )
        settings = SimpleNamespace(
            prune=kind,
            prune_final=0.5,
            prune_pattern="any",
            prune_groups=2,
            prune_multiple=1,
            prune_compute=compute,
        )
        way = MagnitudePruning if kind == "magnitude" else UnitPruning
        method = way(settings, arguments(world_size, gated))
        assert method.prune(run, method.due(Fraction(1, 2)))
        masks = what_stays(pruned, dense, kind)
        kept_beside(pruned, compute)
        with torch.no_grad():
            for name, mask in masks.items():
                dense.get_submodule(name).weight.mul_(mask)

        generator = torch.Generator().manual_seed(7)
        inputs = torch.randn(8, 2, HIDDEN, generator=generator)[rank * 8 // world_size :]
        inputs = inputs[: 8 // world_size].contiguous()
        found = {}
        for which, layer in (("pruned", pruned), ("dense", dense)):
            x = inputs.clone().requires_grad_()
            y = layer(x, attention_mask=torch.zeros(1, 1, 8, 8, dtype=torch.bool))[0]
            y.square().sum().backward()
            found[which] = [y.detach(), x.grad]
            for name, mask in masks.items():
                linear = layer.get_submodule(name)
                grad = linear.weight.grad
                found[which].append(grad.flatten() if which == "pruned" else grad[mask])
        differences = [
            float((one - other).abs().max()) if one.numel() else 0.0
            for one, other in zip(found["pruned"], found["dense"], strict=True)
        ]
        numbers = [sum(p.numel() for p in layer.parameters()) for layer in (dense, pruned)]
        return differences, numbers


def kept_beside(layer, compute):
    """Check what is counted against what is kept for computing."""
    for name, linear in layer.named_modules():
        if not hasattr(linear, "weight_index"):
            continue
        left, (rows, columns) = len(linear.weight_index), linear.dynmo_shape
        pattern = rows + 1 + left + columns + 1 + 2 * left
        wanted = pattern if compute == "sparse" else rows * columns
        assert linear.dynmo_bytes_beside == 4 * wanted, name


def what_stays(pruned, dense, kind):
    """{linear layer: bool mask of its dense weight, true where nothing was removed}."""
    import torch

    masks = {}
    for name, module in dense.named_modules():
        if name.rpartition(".")[2] not in MATRICES:
            continue
        mask = torch.zeros_like(module.weight, dtype=torch.bool)
        if kind == "magnitude":
            mask.view(-1)[pruned.get_submodule(name).weight_index.long()] = True
            masks[name] = mask
            continue
        owner = pruned.get_submodule(name.rpartition(".")[0])
        count = FFN if name.startswith("mlp") else HEADS
        here = count // owner.tp_group.size()
        units = [unit % here for unit in kept_units(owner, count)]
        width = module.weight.shape[1] // here
        if name.endswith(("proj", "fc2")):
            mask.view(HIDDEN, here, width)[:, units] = True
        else:
            parts = 2 if name.endswith("fc1") and dense.config.gated_linear_unit else 1
            mask.view(parts, here, -1, HIDDEN)[:, units] = True
        masks[name] = mask
    return masks


@pytest.mark.parametrize(
    ("kind", "compute", "gated", "ranks"),
    [
        ("magnitude", "dense", True, 2),
        pytest.param("magnitude", "sparse", False, 2, marks=pytest.mark.matrix),
        ("neuron", "auto", True, 2),
        pytest.param("head", "auto", False, 1, marks=pytest.mark.matrix),
    ],
)
def test_a_pruned_layer_equals_the_masked_dense_one(kind, compute, gated, ranks):
    for differences, (whole, left) in run_ranks(compare, ranks, kind, compute, gated):
        assert max(differences) < 1e-5, differences
        assert left < whole

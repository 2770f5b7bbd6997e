"""Reductions by layer over real gloo ranks: the layers beside one leave no trace in it."""

from types import SimpleNamespace

from tests.ranks import run_ranks

# Layers on this stage in two layouts; layer 3 is in both.
LAYOUTS = ([0, 1, 2, 3], [3])


def reduced_layer_3(rank, world_size):
    """Return layer 3's summed gradients for each layout, by layer and all in one, as bytes."""
    import torch
    from megatron.core.distributed.finalize_model_grads import (
        _allreduce_non_tensor_model_parallel_grads as reduce,
    )
    from torch.distributed import group

    from megatron_dynmo.adapters.layer_reductions import ModelPart

    config = SimpleNamespace(sequence_parallel=True, qk_layernorm=False)
    ddp_config = SimpleNamespace(use_megatron_fsdp=False)

    def layer(number):
        generator = torch.Generator().manual_seed(100 * number + rank)
        norm = torch.nn.LayerNorm(37)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
            parameter.main_grad = torch.randn(37, generator=generator)
        return norm

    results = []
    for one_by_one in (True, False):
        for numbers in LAYOUTS:
            layers = {f"decoder.layers.{n}": layer(n) for n in numbers}
            parts = [ModelPart(ddp_config, {name: module}) for name, module in layers.items()]
            for model in [[part] for part in parts] if one_by_one else [parts]:
                reduce(model, config, group.WORLD)
            norm = layers["decoder.layers.3"]
            results.append(
                b"".join(parameter.main_grad.numpy().tobytes() for parameter in norm.parameters())
            )
    return results


def test_a_layers_reduction_does_not_depend_on_its_neighbours():
    for one, other, together, alone in run_ranks(reduced_layer_3, 4):
        assert one == other == alone
        # Control: all layers in one buffer, as upstream does it, is another order of additions.
        assert together != alone

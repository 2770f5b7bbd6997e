"""What is pruned does not depend on tensor- or data-parallel sizes."""

from argparse import Namespace
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest

from tests.ranks import run_ranks

HIDDEN, FFN, HEADS, LAYERS = 16, 24, 4, 2
SHAPES = {
    "qkv": (3 * HIDDEN, HIDDEN),
    "proj": (HIDDEN, HIDDEN),
    "fc1": (2 * FFN, HIDDEN),
    "fc2": (HIDDEN, FFN),
}


def prune(rank, world_size, tp_size, kind, gated, pattern="any"):
    """Prune a model of two layers twice: to 30 and 60 %, two of four to 30 and 50 %.

    Returns:
        {(layer, matrix): [(row, column, value as text)]} of this rank's weights that are left, in
        numbers of the whole matrices as they were built.
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
        parallel_state.initialize_model_parallel(tp_size)
        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        layers = build_layers(tp_size, gated)
        with torch.no_grad():
            layers[1].self_attention.linear_proj.weight.mul_(1e-3)  # would be emptied first
        run = SimpleNamespace(
            topology=Topology.of_this_rank(),
            stage=SimpleNamespace(layers=lambda: layers, config=layers[1].config),
        )
        final = Fraction(5 if pattern == "2:4" else 6, 10)
        config = SimpleNamespace(
            prune=kind, prune_final=float(final), prune_pattern=pattern, prune_compute="dense",
            prune_groups=2, prune_multiple=1,
        )  # fmt: skip
        method = (MagnitudePruning if kind == "magnitude" else UnitPruning)(
            config, arguments(tp_size, gated)
        )
        for share in (Fraction(3, 10), final):
            assert method.prune(run, method.due(share))
            assert method.due(share) == 0
        return what_is_left(layers, gated), method.state()


def build_layers(tp_size, gated, sequence_parallel=False):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=tp_size,
        gated_linear_unit=gated,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return {
        number: build_module(
            get_gpt_layer_local_spec(), config=config, layer_number=number, pg_collection=groups
        )
        for number in range(1, LAYERS + 1)
    }


def arguments(tp_size, gated):
    return Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        group_query_attention=False,
        kv_channels=HIDDEN // HEADS,
        swiglu=gated,
        seq_length=8,
        micro_batch_size=1,
        tensor_model_parallel_size=tp_size,
    )


def what_is_left(layers, gated):
    """Places in the whole matrices, worked out here from what the layers say is left."""
    import torch

    left = {}
    for number, layer in layers.items():
        neurons, heads = kept_units(layer.mlp, FFN), kept_units(layer.self_attention, HEADS)
        width, parts = HIDDEN // HEADS, 2 if gated else 1
        rows_of_heads = [head * 3 * width + line for head in heads for line in range(3 * width)]
        columns_of_heads = [head * width + line for head in heads for line in range(width)]
        rows_of_neurons = [part * FFN + neuron for part in range(parts) for neuron in neurons]
        every = list(range(HIDDEN))
        for name, linear, rows, columns in (
            ("qkv", layer.self_attention.linear_qkv, rows_of_heads, every),
            ("proj", layer.self_attention.linear_proj, every, columns_of_heads),
            ("fc1", layer.mlp.linear_fc1, rows_of_neurons, every),
            ("fc2", layer.mlp.linear_fc2, every, neurons),
        ):
            weight = linear.weight.detach()
            if hasattr(linear, "weight_index"):
                index = linear.weight_index.long()
                places = [(i // len(columns), i % len(columns)) for i in index.tolist()]
                assert torch.equal(linear.dynmo_pattern.dense(weight).view(-1)[index], weight[0])
            else:
                places = [(r, c) for r in range(len(rows)) for c in range(len(columns))]
            left[number, name] = [
                (rows[r], columns[c], value.hex())
                for (r, c), value in zip(places, weight.flatten().tolist(), strict=True)
            ]
    return left


def kept_units(owner, count):
    """Numbers of this rank's units that are left."""
    if hasattr(owner, "dynmo_kept"):
        return owner.dynmo_kept.ids.tolist()
    here = count // owner.tp_group.size()
    return list(range(owner.tp_group.rank() * here, (owner.tp_group.rank() + 1) * here))


@pytest.mark.parametrize(
    ("kind", "gated"),
    [
        ("magnitude", True),
        pytest.param("neuron", True, marks=pytest.mark.matrix),
        pytest.param("head", False, marks=pytest.mark.matrix),
    ],
)
def test_tensor_and_data_parallel_runs_prune_the_same(kind, gated):
    ((alone, _),) = run_ranks(prune, 1, 1, kind, gated)
    (first, state), (second, _) = run_ranks(prune, 2, 1, kind, gated)  # data parallel
    assert first == second == alone
    shards = run_ranks(prune, 2, 2, kind, gated)  # tensor parallel
    for place, expected in alone.items():
        split = [row for shard, _ in shards for row in shard[place]]
        if kind != "magnitude":
            split = sorted(set(split))  # what a kind leaves alone
            assert sorted(set(expected)) == split, place
        else:
            assert sorted(expected) == sorted(split), place
    if kind == "magnitude":
        total = sum(map(len, alone.values()))
        whole = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
        assert total == whole - whole * 6 // 10
        assert len(alone[1, "proj"]) == 11, "a tenth of 40 % of 256, rounded up"
        assert [t for s in state["left"] for m in s for t in m] == [
            len(alone[place]) for place in alone
        ]
    else:
        assert state == shards[0][1] == shards[1][1]
        assert sum(state["slices"]) == LAYERS * (FFN if kind == "neuron" else HEADS) // 2 - (
            LAYERS * (FFN if kind == "neuron" else HEADS) // 2 * 6 // 10
        )


def test_tensor_and_data_parallel_runs_leave_the_same_two_of_four():
    ((alone, _),) = run_ranks(prune, 1, 1, "magnitude", True, "2:4")
    (first, _), (second, _) = run_ranks(prune, 2, 1, "magnitude", True, "2:4")
    assert first == second == alone
    shards = run_ranks(prune, 2, 2, "magnitude", True, "2:4")
    for place, expected in alone.items():
        assert sorted(expected) == sorted(row for shard, _ in shards for row in shard[place])
        groups = Counter((row, column // 4) for row, column, _ in expected)
        assert set(groups.values()) == {2}, place
        rows, columns = SHAPES[place[1]]
        assert len(groups) == rows * columns // 4, place


def resume_lower(rank, world_size):
    """Prune until a matrix is as empty as it may be, and go on with a lower final share.

    Returns:
        Weights that are left of the emptied matrix, before and after; of all that there are.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_dynmo.adapters.topology import Topology
    from megatron_dynmo.cpu import cpu_specs
    from megatron_dynmo.dynamics.pruning.magnitude import MagnitudePruning
    from megatron_dynmo.patching import patched

    with patched(cpu_specs()):
        parallel_state.initialize_model_parallel(1)
        model_parallel_cuda_manual_seed(1)
        layers = build_layers(1, False)
        with torch.no_grad():
            layers[1].self_attention.linear_proj.weight.mul_(1e-3)
        run = SimpleNamespace(
            topology=Topology.of_this_rank(),
            stage=SimpleNamespace(layers=lambda: layers, config=layers[1].config),
        )
        left, state = [], None
        for final, share, compute in (
            (0.9, Fraction(1, 2), "dense"),
            (0.6, Fraction(6, 10), "auto"),
        ):
            config = SimpleNamespace(
                prune="magnitude", prune_final=final, prune_pattern="any", prune_compute=compute
            )
            method = MagnitudePruning(config, arguments(1, False))
            if state is not None:
                method.restore(state)
            method.begin(run)
            # What was pruned without a measurement gets one before training goes on.
            assert (method.state()["measured"] is not None) == (compute == "auto")
            method.prune(run, method.due(share))
            state = method.state()
            left.append(state["left"][0][1][0])
        return left, sum(count for layer in state["left"] for matrix in layer for count in matrix)


def test_a_lower_final_share_leaves_what_is_emptied_as_it_is():
    ((left, total),) = run_ranks(resume_lower, 1)
    assert left == [3, 3], "a tenth of 10 %, and not the tenth of 40 % that is no longer there"
    whole = LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN)
    assert total == whole - whole * 6 // 10

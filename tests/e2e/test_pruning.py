"""Pruned weights stay away: through optimizer steps, moves, a checkpoint and another layout."""

import hashlib

import pytest

from tests.e2e.conformance import SETTINGS, Case, cell_of
from tests.e2e.matrix import LLAMA
from tests.e2e.moving import train_ours
from tests.e2e.parity import compare, read_trace
from tests.ranks import RanksFailed, run_ranks

ONCE = (
    *("--pipeline-model-parallel-size", "2", "--train-iters", "10"),
    *("--dynmo-prune-final", "0.5", "--dynmo-prune-begin", "3", "--dynmo-prune-end", "3"),
)


def watch(iteration, model, optimizer):
    """What is left of each layer here, where, and what is kept for it.

    Returns:
        {layer_number: (bytes of a move, [(name, numel, sha256 of the places, zeros among the
        values, bytes of gradient and moments)])}
    """
    from megatron_dynmo.patches.training import controller

    stage = controller()._session._run.stage
    found = {}
    held, _, _ = stage.static_bytes()
    for number, layer in stage.layers().items():
        buffers = dict(layer.named_buffers())
        rows = []
        for name, param in layer.named_parameters():
            index = buffers.get(name.replace("weight_values", "weight_index"))
            places = None if index is None else hashlib.sha256(index.numpy().tobytes()).hexdigest()
            state = stage.codec().capture(param)
            kept = [param.main_grad, *(t for t in state.tensors.values() if t.dim())]
            size = sum(tensor.nbytes for tensor in kept)
            rows.append((name, param.numel(), places, int((param == 0).sum()), size))
        compact = [m for m in layer.modules() if hasattr(m, "dynmo_shape")]
        copies = sum(4 * m.dynmo_shape[0] * m.dynmo_shape[1] for m in compact)  # dense products
        gradients = sum(param.main_grad.nbytes for param in layer.parameters())
        assert held[number] == stage.parcel(number).num_bytes + gradients + copies
        found[number] = stage.parcel(number).num_bytes, rows
    return found


def by_layer(results):
    """[{layer_number: rows}] after every step, over all ranks."""
    steps = zip(*(result["watched"] for result in results), strict=True)
    return [{number: rows for rank in step for number, rows in rank.items()} for step in steps]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["magnitude", "neuron"])
def test_what_was_pruned_stays_so_through_steps_moves_and_a_resume(kind, tmp_path):
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "6")
    dense = ("--dynmo-prune-compute", "dense") if kind == "magnitude" else ()
    flags = (*ONCE, "--dynmo-prune", kind, *dense)
    logged = ("--dynmo-log-dir", str(tmp_path / "log"))
    moves = ("--dynmo-force-layout", "1:Ettt|tL;2:Et|tttL;5:Ettt|tL")
    moved = by_layer(run_ranks(train_ours, 2, watch, None, *flags, *save, *logged, *moves))
    again = ("--load", str(tmp_path / "saved"), "--dynmo-force-layout", "8:E|ttttL")
    resumed = by_layer(run_ranks(train_ours, 2, watch, None, *flags, *again, "--ckpt-step", "6"))
    assert len(moved) == 10 and len(resumed) == 4
    for layers in (*moved[2:], *resumed):
        assert layers == moved[2]

    whole, left = Totals(moved[1]), Totals(moved[2])
    if kind == "magnitude":
        assert left.weights * 2 == whole.weights
    assert left.zeros == 0, "what is left has no zeros among it"
    # fp32: gradient and two moments.
    assert whole.kept_bytes == 12 * whole.numbers
    assert left.kept_bytes == 12 * left.numbers
    # A move sends weights and two moments, and for each weight or neuron that is left its place.
    places = left.weights if kind == "magnitude" else left.neurons
    assert whole.moved_bytes - left.moved_bytes == 12 * (whole.numbers - left.numbers) - 4 * places
    _, before, after = (event["bytes"] for event in read_trace(tmp_path / "log").migrations)
    share = {n: layers[2][0] + layers[3][0] for n, layers in ((0, moved[1]), (1, moved[2]))}
    assert before - after == share[0] - share[1]


class Totals:
    """Sums over all layers of what `watch` saw."""

    def __init__(self, layers):
        self.moved_bytes = sum(size for size, _ in layers.values())
        rows = [row for _, rows in layers.values() for row in rows]
        matrices = [row for row in rows if "linear" in row[0] and "bias" not in row[0]]
        self.numbers = sum(numel for _, numel, *_ in rows)
        self.weights = sum(numel for _, numel, *_ in matrices)
        self.zeros = sum(zeros for _, _, _, zeros, _ in matrices)
        self.neurons = sum(numel for name, numel, *_ in rows if name.endswith("fc1.bias"))
        self.kept_bytes = sum(size for *_, size in rows)


@pytest.mark.matrix
@pytest.mark.parametrize("flags", [(), LLAMA], ids=["", "gated"])
def test_moves_change_nothing_where_products_are_sparse(flags, tmp_path):
    case = Case(
        "sparse products",
        (
            *("--dynmo-prune", "magnitude", "--dynmo-prune-compute", "sparse", *flags),
            *("--dynmo-prune-begin", "2", "--dynmo-prune-end", "9", "--dynmo-prune-every", "3"),
        ),
    )
    row = compare(cell_of(case, SETTINGS[0]), tmp_path)
    assert row["loss_equal"] and row["digests_equal"], row


@pytest.mark.matrix
def test_a_checkpoint_of_another_kind_is_refused_by_name(tmp_path):
    flags = (*ONCE, "--train-iters", "4")
    run_ranks(
        *(train_ours, 2, None, None, *flags, "--dynmo-prune", "head"),
        *("--save", str(tmp_path), "--save-interval", "4"),
    )
    with pytest.raises(RanksFailed, match="--dynmo-prune head"):
        run_ranks(
            train_ours, 2, None, None, *flags, "--dynmo-prune", "neuron", "--load", str(tmp_path)
        )

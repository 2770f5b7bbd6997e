"""Moves on real Megatron that the parity table does not have: three stages, MoE, MTP, overflow."""

import pytest

from tests.e2e.moving import train_ours
from tests.e2e.parity import Cell, compare, read_trace
from tests.ranks import run_ranks

PP2 = ("--pipeline-model-parallel-size", "2")

CELLS = [
    # A middle stage that must never touch the embedding group.
    Cell(
        "case 16: fp32, PP 3, tied",
        3,
        ("--pipeline-model-parallel-size", "3", "--num-layers", "6", "--global-batch-size", "6"),
        "2:Ett|t|tttL;4:E||ttttttL;6:Et|ttttt|L;8:Ett|tt|ttL",
    ),
    Cell(
        "case 20: MoE behind one dense layer",
        2,
        (
            *PP2,
            *("--num-layers", "7", "--num-experts", "4", "--moe-router-topk", "2"),
            *("--moe-layer-freq", "([0]*1+[1]*6)", "--disable-bias-linear"),
            *("--moe-aux-loss-coeff", "0.01", "--moe-router-score-function", "sigmoid"),
            # A dispatcher that holds on to the graph of the last micro-batch, and its hooks.
            *("--moe-token-dispatcher-type", "alltoall", "--overlap-grad-reduce"),
            # Modules that keep a deep copy of the config.
            *("--moe-shared-expert-intermediate-size", "32", "--moe-ffn-hidden-size", "32"),
            *("--moe-router-enable-expert-bias", "--pipeline-model-parallel-layout"),
            "Ettt|ttttL",
        ),
        "2:E|tttttttL;4:Etttttt|tL",
    ),
    Cell(
        "MTP: the last layer stays",
        2,
        (*PP2, "--mtp-num-layers", "1", "--position-embedding-type", "rope"),
        "2:Ettt|tmL;5:E|ttttmL;7:Ett|ttmL",
    ),
]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, id=c.name, marks=[pytest.mark.matrix] * ("case 20" not in c.name))
        for c in CELLS
    ],
)
def test_a_moved_run_equals_the_unmoved_one(cell, tmp_path):
    row = compare(cell, tmp_path)
    assert row["loss_equal"] and row["digests_equal"], row


def _embedding_and_random_streams(step, model, optimizer):
    """Digest of this rank's copy of the tied embedding, and what building a layer draws."""
    from megatron.core.transformer.module import Float16Module
    from megatron.training.global_vars import get_args

    from megatron_dynmo.adapters import model as models
    from megatron_dynmo.adapters.topology import Topology
    from tests.e2e.training import _digest

    (chunk,) = models.chunks_of(model)
    assert not isinstance(chunk.core, Float16Module)
    copy = chunk.core.shared_embedding_or_output_weight()
    numbers = chunk.layer_numbers
    assert len(numbers) == chunk.block.num_layers_per_pipeline_rank
    before = _streams()
    spec = models.decoder_layer_specs(chunk)[0]
    built = models.build_layer(chunk, spec, get_args().num_layers, Topology.of_this_rank().pp_rank)
    assert built.layer_number == get_args().num_layers and built.training
    return {"copy": _digest(copy), "layers": numbers, "drew": _streams() != before}


def _streams() -> list:
    """The state of every random stream that training draws from."""
    import random

    import numpy as np
    import torch
    from megatron.core import tensor_parallel

    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    assert tracked
    return [
        torch.random.get_rng_state().tolist(),
        torch.cuda.get_rng_state().tolist(),
        {name: state.tolist() for name, state in tracked.items()},
        random.getstate(),
        [part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()],
    ]


def test_case_15_both_copies_of_a_tied_embedding_stay_equal_and_building_draws_nothing():
    first, last = run_ranks(
        train_ours,
        2,
        _embedding_and_random_streams,
        None,
        *PP2,
        *("--pipeline-model-parallel-layout", "Et|tttL", "--train-iters", "10"),
        *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--dynmo-layer-rng"),
        *("--dynmo-force-layout", "2:Ettt|tL;5:Et|tttL;8:E|ttttL"),
    )
    copies = [step["copy"] for step in first["watched"]]
    assert copies == [step["copy"] for step in last["watched"]]
    assert len(set(copies)) == 10, "the embedding is trained"
    held = [(len(a["layers"]), len(b["layers"])) for a, b in zip(
        first["watched"], last["watched"], strict=True
    )]  # fmt: skip
    assert held == [(1, 3)] + [(3, 1)] * 3 + [(1, 3)] * 3 + [(0, 4)] * 3
    assert not any(step["drew"] for step in (*first["watched"], *last["watched"]))


def _loss_scale(step, model, optimizer):
    return float(optimizer.get_loss_scale())


@pytest.mark.matrix
def test_case_29_an_overflow_in_the_middle_of_moves_keeps_one_loss_scale():
    flags = (*PP2, "--fp16", "--pipeline-model-parallel-layout", "Et|tttL", "--train-iters", "8")
    still, moved = (
        run_ranks(train_ours, 2, _loss_scale, None, *flags, "--dynmo-force-layout", moves)
        for moves in ("9:Ettt|tL", "3:Ettt|tL;5:E|ttttL")
    )
    # From 2**32 (which has one overflow to spare) down by a half at each: every step is skipped.
    scales = [2.0 ** (32 - step) for step in range(8)]
    for ranks in (still, moved):
        assert [rank["watched"] for rank in ranks] == [scales, scales]
    assert moved[-1]["losses"] == still[-1]["losses"]
    assert moved[0]["grad_norms"] == still[0]["grad_norms"]


def _fail_three_times(rank: int) -> None:
    """The first move fails in prepare on rank 1, the next two in transfer on rank 1 and rank 0."""
    from megatron_dynmo.adapters import model as models
    from megatron_dynmo.adapters.stage import MegatronStage
    from megatron_dynmo.transport import Transport

    build, accept, room = models.build_layer, MegatronStage.accept, Transport._room
    calls = {"build": 0, "accept": 0, "room": 0}

    def failing(name, original, on_rank, at_call):
        def wrapper(*args, **kwargs):
            calls[name] += 1
            result = original(*args, **kwargs)
            if rank == on_rank and calls[name] == at_call:
                raise MemoryError(f"injected into {name}")
            return result

        return wrapper

    models.build_layer = failing("build", build, 1, 1)
    MegatronStage.accept = failing("accept", accept, 1, 1)
    Transport._room = failing("room", room, 0, 2)


def test_refused_moves_change_no_bit_and_training_goes_on(tmp_path):
    """Four attempts at one move, of which the last succeeds."""
    overlap = ("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce")
    flags = (*PP2, *overlap, "--overlap-param-gather", "--clip-grad", "1.0", "--train-iters", "8")
    traces = []
    for name, fault, moves in (
        ("still", None, "9:Et|tttL"),
        ("tried", _fail_three_times, "2:Et|tttL;3:Et|tttL;4:Et|tttL;5:Et|tttL"),
    ):
        folder = tmp_path / name
        run_ranks(
            train_ours,
            2,
            None,
            fault,
            *flags,
            *("--dynmo-force-layout", moves, "--dynmo-log-dir", str(folder)),
            *("--dynmo-digest-interval", "1"),
            log_dir=folder / "ranks",
        )
        traces.append(read_trace(folder))
    still, tried = traces
    assert not still.migrations
    assert [(m["iteration"], m["from"], m["to"]) for m in tried.migrations] == [
        (5, "Ett|ttL", "Et|t*3L")
    ]
    said = (tmp_path / "tried" / "ranks" / "rank1.log").read_text()
    for phase, rank, where in (("prepare", 1, "build"), ("transfer", 1, "accept"),
                               ("transfer", 0, "room")):  # fmt: skip
        assert f"failed in {phase}: rank {rank}: MemoryError: injected into {where}" in said
    assert said.count("Every rank still holds Ett|ttL; training goes on there") == 3
    assert (still.losses, still.grad_norms) == (tried.losses, tried.grad_norms)
    assert still.digests == tried.digests and len(still.digests) == 8

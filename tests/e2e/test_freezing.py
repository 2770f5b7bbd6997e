"""What a frozen front saves in a real run, and that the rest trains on as it should."""

import pytest

from megatron_dynmo.reporter import EVENTS_FILE
from megatron_dynmo.telemetry.events import read_events
from tests.e2e.moving import train_ours
from tests.e2e.parity import read_trace
from tests.ranks import run_ranks

UNTIED = "--untie-embeddings-and-output-weights"
PP2 = ("--pipeline-model-parallel-size", "2")


def schedule(text):
    return (UNTIED, "--dynmo-freeze", "schedule", "--dynmo-freeze-schedule", text)


def train(folder, *flags, ranks=2, watch=None, fault=None):
    """Six iterations; losses, gradient norms and digests are in the trace, the rest in results."""
    results = run_ranks(
        *(train_ours, ranks, watch, fault, "--train-iters", "6", "--clip-grad", "1.0", *flags),
        *("--dynmo-log-dir", str(folder), "--dynmo-digest-interval", "1"),
        timeout_s=240,
    )
    return read_trace(folder), results


def count_gradients_sent(rank):
    """Count the tensors that the schedule hands to its communication for the rank before."""
    from megatron.core.pipeline_parallel import p2p_communication as p2p

    def counting(original):
        def ops(**tensors):
            SENT[0] += tensors["tensor_send_prev"] is not None
            RECEIVED[0] += tensors["tensor_recv_next"] is not None
            return original(**tensors)

        return ops

    for name in ("_p2p_ops", "_batched_p2p_ops"):
        setattr(p2p, name, counting(getattr(p2p, name)))


SENT, RECEIVED = [0], [0]


def look(iteration, model, optimizer):
    """What was sent in this iteration, and what this rank holds after it."""
    seen = {"sent": SENT[0], "received": RECEIVED[0]}
    SENT[0] = RECEIVED[0] = 0
    seen["moments"] = sum(
        state[key].numel()
        for member in optimizer.chained_optimizers
        for state in member.optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    )
    seen["gradients"] = sum(b.grad_data.numel() for ddp in model for b in ddp.buffers)
    return seen


@pytest.mark.parametrize(
    ("flags", "depths", "sent"),
    [
        # All of stage 0 from iteration 3 on, less again from iteration 5 on.
        (PP2, "2:2;4:1", [4, 4, 0, 0, 4, 4]),
        pytest.param(
            # Boundaries behind layers 2, 4 and 6: the first is dead from iteration 3 on, the
            # second from iteration 5 on.
            (*PP2, "--num-layers", "8", "--num-virtual-stages-per-pipeline-rank", "2"),
            "2:3;4:5",
            [12, 12, 8, 8, 4, 4],
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["1F1B", "interleaved"],
)
def test_a_dead_front_sends_no_gradient_and_holds_no_state(flags, depths, sent, tmp_path):
    trace, results = train(
        *(tmp_path, *flags, *schedule(depths)), watch=look, fault=count_gradients_sent
    )
    watched = [result["watched"] for result in results]
    for name in ("sent", "received"):
        assert [sum(rank[i][name] for rank in watched) for i in range(6)] == sent
    first = watched[0]
    if "--num-layers" not in flags:
        # Moments and gradients of a whole stage are gone, and come back with its second layer.
        assert first[0]["moments"] == 2 * first[0]["gradients"] > 0
        assert first[1]["moments"] == first[1]["gradients"] == 0
        assert 0 < first[3]["gradients"] < first[0]["gradients"] / 2
    events = [e for e in read_events(tmp_path / EVENTS_FILE) if e["event"] == "dynamics"]
    last = int(depths[2])
    assert events[0]["frozen"] == list(range(1, last + 1)) and events[0]["embedding"]
    assert events[0]["released_bytes"] > 0
    assert (events[1]["released_bytes"] < events[0]["released_bytes"]) == (depths[-1] == "1")
    # A layer that thaws after iteration 4 has its new moments in the digest of 4.
    for unit in ("embedding", "1", *([] if depths[-1] == "1" else [str(last)])):
        assert trace.digests[3][unit] == trace.digests[4][unit], f"{unit} is frozen"
    for unit in (str(last + 1), "output"):
        assert trace.digests[3][unit] != trace.digests[4][unit], f"{unit} is trained"
    assert (trace.digests[5]["2"] != trace.digests[6]["2"]) == (depths[-1] == "1")


@pytest.mark.matrix
def test_recompute_behind_a_frozen_front_trains_what_it_should(tmp_path):
    full = ("--recompute-granularity", "full", "--recompute-num-layers")
    plain, _ = train(tmp_path / "plain", *PP2, *schedule("2:1;4:2"))
    for kind, flags in (
        ("uniform", (*full, "1", "--recompute-method", "uniform")),
        ("two a checkpoint", (*full, "2", "--recompute-method", "uniform")),
        ("block", (*full, "1", "--recompute-method", "block")),
        ("selective", ("--recompute-granularity", "selective")),
    ):
        trace, _ = train(tmp_path / kind, *PP2, *schedule("2:1;4:2"), *flags)
        assert trace.losses == plain.losses, kind
        assert trace.grad_norms == plain.grad_norms, kind
        assert trace.digests == plain.digests, kind
    assert all(float.fromhex(norm) > 0 for norm in plain.grad_norms.values())


@pytest.mark.matrix
def test_one_stage_and_two_freeze_and_train_alike(tmp_path):
    """From one checkpoint; the norm is that of the trainable parameters only."""
    saved = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "2")
    two, _ = train(tmp_path / "two", *PP2, *schedule("2:2;4:3"), *saved)
    load = ("--load", str(tmp_path / "checkpoints"), "--ckpt-step", "2")
    one, _ = train(tmp_path / "one", *schedule("2:2;4:3"), *load, ranks=1)
    assert sorted(one.grad_norms) == [3, 4, 5, 6]
    for iteration, norm in one.grad_norms.items():
        assert float.fromhex(norm) == pytest.approx(float.fromhex(two.grad_norms[iteration]), 1e-5)


VOCABULARY = "--make-vocab-size-divisible-by"


@pytest.mark.matrix
@pytest.mark.parametrize("rule", ["autofreeze", "egeria"])
def test_data_and_tensor_parallel_ranks_freeze_what_one_rank_freezes(rule, tmp_path):
    # All begin from the same weights, whatever part of them a rank has.
    flags = (UNTIED, "--use-cpu-initialization", "--dynmo-freeze", rule)
    flags += ("--dynmo-freeze-interval", "1")
    if rule == "autofreeze":
        flags += ("--dynmo-freeze-percentile", "1")
    else:
        flags += ("--dynmo-freeze-window", "2", "--dynmo-freeze-tolerance", "1")
    found = {}
    for name, ranks, more in (
        ("1", 1, ()),
        ("DP 2", 2, ()),
        ("DP 2 sharded", 2, ("--use-distributed-optimizer",)),
        # The vocabulary is padded to a multiple of this for each tensor-parallel rank.
        ("TP 2", 2, (*("--tensor-model-parallel-size", "2"), *(VOCABULARY, "64"))),
    ):
        train(tmp_path / name, *flags, *(VOCABULARY, "128"), *more, ranks=ranks)
        found[name] = [
            (event["iteration"], event["frozen"])
            for event in read_events(tmp_path / name / EVENTS_FILE)
            if event["event"] == "dynamics"
        ]
    assert found["1"] and all(frozen == found["1"] for frozen in found.values()), found


@pytest.mark.matrix
def test_a_layer_of_the_front_takes_less_than_forty_percent_of_its_time(tmp_path):
    # Where products of matrices are what takes time, a backward takes twice a forward.
    size = ("--hidden-size", "512", "--ffn-hidden-size", "2048")
    # Two iterations on either side: a longer window would not be full before the freeze ends it.
    watched = ("--dynmo-mode", "observe", "--dynmo-window", "1")
    train(*(tmp_path, *PP2, *size, "--max-position-embeddings", "128", *schedule("3:1"), *watched))
    sides: tuple[list[dict[int, dict[str, float]]], ...] = ([], [])
    for event in read_events(tmp_path / EVENTS_FILE):
        if event["event"] == "profile":
            layers = {layer["layer_number"]: layer for layer in event["layers"]}
            sides[event["iteration"] > 3].append(layers)
    before, after = (side[-1] for side in sides)
    assert after[1]["backward_ms"] == 0.0
    both = [min(row[1]["forward_ms"] + row[1]["backward_ms"] for row in side) for side in sides]
    assert both[1] <= 0.4 * both[0], both
    # No gradient, no moments and, without a graph, no activations: what is left are the weights.
    assert after[1]["memory_bytes"] < 0.35 * before[1]["memory_bytes"]
    assert after[2]["memory_bytes"] > 0.9 * before[2]["memory_bytes"]


@pytest.mark.matrix
def test_weights_alone_are_taken_from_a_checkpoint_of_a_frozen_run(tmp_path):
    saved, fine = (("--save", str(tmp_path / name), "--save-interval", "6") for name in "ab")
    whole, _ = train(tmp_path / "whole", *PP2, *schedule("2:1;4:3"), *saved)
    weights = ("--load", str(tmp_path / "a"), "--finetune")
    trace, _ = train(tmp_path / "fine", *PP2, UNTIED, *weights, *fine)
    # Trained on from where the other one ended, on the data that it began with.
    losses = [float.fromhex(run.losses[1]) for run in (whole, trace)]
    assert losses[1] < losses[0] and sorted(trace.losses) == [1, 2, 3, 4, 5, 6]
    more = ("--train-iters", "8", "--lr-decay-iters", "8", "--override-opt_param-scheduler")
    resumed, _ = train(tmp_path / "more", *PP2, UNTIED, "--load", str(tmp_path / "b"), *more)
    assert sorted(resumed.losses) == [7, 8]

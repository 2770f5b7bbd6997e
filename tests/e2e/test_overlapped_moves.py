"""State that follows its layer is used by nobody before it is there, and is then what it was."""

import pytest

from tests.e2e.moving import train_ours
from tests.e2e.parity import read_trace
from tests.ranks import run_ranks

FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--train-iters", "6", "--clip-grad", "1.0"),
    *("--bf16", "--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce"),
)
FOLLOWS = "--dynmo-overlap-moves"
MOVES = "2:Et|t*3L;3:Et*3|tL;4:Ett|ttL"


def as_late_as_can_be(rank: int) -> None:
    """Nothing travels before somebody waits for it, and until then no number is one."""
    import threading

    import torch

    from megatron_dynmo.late_state import Flight
    from megatron_dynmo.transport import Transport

    allocate, fly, land = Transport.allocate, Flight._fly, Flight.land
    is_wanted = threading.Event()

    def allocate_nothing(self, described):
        made = allocate(self, described)
        for tensor in made.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        return made

    def fly_late(self):
        assert is_wanted.wait(60), "nobody has waited for what follows"
        is_wanted.clear()
        fly(self)

    def land_after_that(self):
        is_wanted.set()
        land(self)

    Transport.allocate, Flight._fly, Flight.land = allocate_nothing, fly_late, land_after_that


def run(folder, moves, *flags, fault=None):
    logs = ("--dynmo-log-dir", str(folder), "--dynmo-digest-interval", "1")
    run_ranks(
        train_ours, 2, None, fault, *FLAGS, *flags, *logs, "--dynmo-force-layout", moves,
        timeout_s=200,
    )  # fmt: skip
    return read_trace(folder)


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    return run(tmp_path_factory.mktemp("still"), "7:Ett|ttL")


def numbers(trace, iterations=range(1, 7)):
    found = (trace.losses, trace.grad_norms, trace.digests)
    return [[rows[iteration] for iteration in iterations] for rows in found]


def test_state_that_comes_at_the_last_moment_is_in_time(still, tmp_path):
    late = run(tmp_path, MOVES, FOLLOWS, fault=as_late_as_can_be)
    assert [move["iteration"] for move in late.migrations] == [2, 3, 4]
    assert all(move["overlapped_ms"] > 0 for move in late.migrations)
    assert numbers(late) == numbers(still)


def a_copy(rank: int) -> None:
    """The rebuilt optimizer copies what is not there yet."""
    from megatron_dynmo.adapters.optimizer import StateCodec

    install = StateCodec.install

    def copy(self, param, state):
        for key, tensor in state.tensors.items():
            state.tensors[key] = tensor.clone()
        install(self, param, state)

    StateCodec.install = copy


@pytest.mark.matrix
def test_an_optimizer_that_copies_is_found_out(tmp_path):
    with pytest.raises(Exception, match="the optimizer holds a copy of state/"):
        run(tmp_path, MOVES, FOLLOWS, fault=a_copy)


@pytest.mark.matrix
def test_a_move_that_was_not_made_when_the_run_was_saved_is_made_when_it_resumes(still, tmp_path):
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "3")
    whole = run(tmp_path / "whole", "3:Et|t*3L", FOLLOWS, *save)
    load = ("--load", str(tmp_path / "saved"), "--ckpt-step", "3")
    resumed = run(tmp_path / "resumed", "3:Et|t*3L", FOLLOWS, *load)
    for trace in (whole, resumed):
        assert [(m["iteration"], m["to"]) for m in trace.migrations] == [(3, "Et|t*3L")]
    assert numbers(whole) == numbers(still)
    assert numbers(resumed, (4, 5, 6)) == numbers(still, (4, 5, 6))


@pytest.mark.matrix
def test_a_move_after_the_last_iteration_is_made_at_once(still, tmp_path):
    ended = run(tmp_path, "6:Et|t*3L", FOLLOWS)
    assert [(m["iteration"], m["overlapped_ms"]) for m in ended.migrations] == [(6, 0.0)]
    assert numbers(ended) == numbers(still)

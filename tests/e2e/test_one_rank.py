"""What a move does to one rank, without the way between two: also the dry run of tests/gpu."""

import pytest

from tests.gpu.one_rank import exercise, require_right
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param("torch", (), id="torch", marks=pytest.mark.matrix),
        pytest.param("group", (), id="step in the group", marks=pytest.mark.matrix),
        pytest.param(
            "group", ("--use-distributed-optimizer",), id="step in the group, distributed"
        ),
    ],
)
def test_layers_that_are_built_anew_or_come_and_go_change_no_number(kind, flags):
    (moved,) = run_ranks(exercise, 1, kind, True, *flags)
    (unmoved,) = run_ranks(exercise, 1, kind, False, *flags)
    require_right(moved, unmoved)
    expected = "torch.optim.adamw" if kind == "torch" else "tests.gpu.one_rank"
    assert moved["watched"][3]["optimizers"] == [expected]

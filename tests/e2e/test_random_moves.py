"""Random moves in every configuration of the matrix leave a run as it was, bit for bit."""

import pytest

from tests.e2e.matrix import CELLS, random_cell
from tests.e2e.parity import compare


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(len(CELLS)), ids=lambda seed: CELLS[seed].name)
def test_random_moves_change_nothing(seed, tmp_path, matrix_results):
    configuration = CELLS[seed]
    cell = random_cell(configuration, seed)
    row = {**compare(cell, tmp_path), "ranks": cell.ranks, "layouts": cell.moves}
    matrix_results.append(row)
    assert row["loss_equal"] and row["digests_equal"], row

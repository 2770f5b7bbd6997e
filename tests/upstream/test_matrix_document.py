"""The committed matrix of random moves is whole, equal everywhere, and what the document shows."""

from tests.e2e import matrix_document
from tests.e2e.matrix import CELLS, MOVES, random_cell


def test_every_configuration_was_run_with_its_moves_and_nothing_differed():
    rows = {row["cell"]: row for row in matrix_document.results()}
    assert list(rows) == [cell.name for cell in CELLS]
    assert sum(row["moves"] for row in rows.values()) >= 200
    for seed, cell in enumerate(CELLS):
        row = rows[cell.name]
        assert row["moves"] == MOVES and row["loss_equal"] and row["digests_equal"]
        assert row["layouts"] == random_cell(cell, seed).moves


def test_the_document_shows_the_results():
    text = matrix_document.DOCUMENT.read_text()
    assert text == matrix_document.document(matrix_document.results())

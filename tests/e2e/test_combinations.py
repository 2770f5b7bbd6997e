"""Sets of dynamics: exact under moves, or refused with the reason; and the table that says so."""

import pytest

from tests.e2e.combinations import DOCUMENT, case_of, document, refusals, runnable
from tests.e2e.conformance import SETTINGS, cell_of
from tests.e2e.parity import compare


def test_the_document_lists_every_set_that_runs_or_is_refused():
    # That the sets which run are equal is what the matrix test writes it for.
    assert DOCUMENT.read_text() == document(runnable(), refusals())


@pytest.mark.matrix
def test_every_set_is_exact_under_moves_or_refused(tmp_path):
    sets = runnable()
    assert sets
    for index, names in enumerate(sets):
        row = compare(cell_of(case_of(names), SETTINGS[0]), tmp_path / str(index))
        assert row["loss_equal"] and row["digests_equal"], row
    DOCUMENT.write_text(document(sets, refusals()))

"""Rows that a whole table of cells leaves in benchmarks/results."""

import pytest

from scripts.results import write_results


@pytest.fixture(scope="session")
def parity_results():
    """Collect the rows of the parity table and write them when the session ends."""
    rows = []
    yield rows
    write_results("parity", "real", "make test-matrix", rows)

"""Rows that a whole table of cells leaves in benchmarks/results."""

import pytest

from scripts.results import write_results
from tests.e2e import matrix_document


@pytest.fixture(scope="session")
def parity_results():
    """Collect the rows of the parity table and write them when the session ends."""
    rows = []
    yield rows
    write_results("parity", "real", "make test-slow", rows)


@pytest.fixture(scope="session")
def matrix_results():
    """Collect the rows of the random moves and write them, and their document, at the end."""
    rows = []
    yield rows
    matrix_document.write(rows)

"""The table of faults, which two test modules fill."""

import pytest

from tests import fault_table


@pytest.fixture(scope="session")
def fault_results():
    """Collect the rows of the table of faults and write them when the session ends."""
    rows = []
    yield rows
    fault_table.write(rows)

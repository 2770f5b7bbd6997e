"""The committed table of faults is whole, allowed, and what the document shows."""

from tests import fault_table
from tests.fault_table import MEMORY_CELLS, REAL_CELLS, Cell, wanted


def test_every_cell_was_run_and_ended_as_it_must():
    found = {
        Cell(row["run"], row["phase"], row["rank"], row["fault"]): row["outcome"]
        for row in fault_table.read()
    }
    assert found == {cell: wanted(cell) for cell in (*MEMORY_CELLS, *REAL_CELLS)}
    assert set(found.values()) <= {fault_table.CONTINUED, fault_table.STOPPED}


def test_the_document_shows_the_results():
    assert fault_table.DOCUMENT.read_text() == fault_table.document(fault_table.read())


def test_a_table_with_a_cell_missing_is_not_written(monkeypatch, tmp_path):
    def never(*args):
        raise AssertionError("written")

    monkeypatch.setattr(fault_table, "write_results", never)
    rows = fault_table.read()
    monkeypatch.setattr(fault_table, "RESULTS", tmp_path / "none before")
    fault_table.write(rows[1:])

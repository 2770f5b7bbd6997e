"""docs/patches.md says what the specs say."""

from pathlib import Path

from megatron_dynmo.commands.patches import document
from megatron_dynmo.patches import all_specs


def test_the_document_is_made_from_the_specs():
    path = Path(__file__).parents[2] / "docs" / "patches.md"
    assert path.read_text() == document(all_specs()), "run `make docs`"

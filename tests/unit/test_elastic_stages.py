import pytest

from megatron_dynmo.elastic.stages import spread, without_empty
from megatron_dynmo.layout import LayerLayout


def layout(text, num_layers, num_stages):
    return LayerLayout.from_megatron(text, num_layers=num_layers, num_stages=num_stages)


@pytest.mark.parametrize(
    ("narrow", "places", "wide"),
    [
        ("Et*5|t*3L", (0, 3), "Et*5|||t*3L"),
        ("Et|t*6|tL", (0, 2, 3), "Et||t*6|tL"),
        ("Et*3|tt|t|ttL", (0, 2), "Et*3||tt|t||ttL"),  # two virtual stages
        ("Et*3|t*5mL", (0, 2), "Et*3||t*5mL"),
    ],
)
def test_stages_without_layers_come_and_go(narrow, places, wide):
    num_stages = places[-1] + 1
    few, many = layout(narrow, 8, len(places)), layout(wide, 8, num_stages)
    assert spread(few, places, num_stages) == many
    assert without_empty(many, places) == few


def test_a_stage_with_layers_does_not_go():
    with pytest.raises(AssertionError):
        without_empty(layout("Et|t|ttL", 4, 3), (0, 2))

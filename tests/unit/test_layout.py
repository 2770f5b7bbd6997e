"""Layouts: parsing, writing, ownership, and errors that say what to change."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynmo.errors import LayoutError
from megatron_dynmo.layout import LayerLayout


def sizes(layout: LayerLayout) -> list[int]:
    bounds = layout.boundaries
    return [b - a for a, b in pairwise(bounds)]


def rank_sizes(layout: LayerLayout) -> list[int]:
    return [layout.num_layers_of_rank(rank) for rank in range(layout.num_stages)]


@pytest.mark.parametrize(
    ("text", "num_layers", "num_stages", "expected"),
    [
        ("Et*5|tttL", 8, 2, [5, 3]),
        ("Et,tt|t*5L", 8, 2, [3, 5]),
        ("E|ttttL", 4, 2, [0, 4]),
        ("Ett||t|tL", 4, 4, [2, 0, 1, 1]),
        ("E(tt|)*3L", 6, 4, [2, 2, 2, 0]),
        ("EttttL", 4, 1, [4]),
        ("Et|t|t|tL", 4, 2, [1, 1, 1, 1]),
        ("E(t*2|)*2tL", 5, 3, [2, 2, 1]),
        # Megatron builds the embedding in the first chunk and the loss in the last, wherever the
        # empty chunks are written.
        ("|Ett|tt|L", 4, 4, [0, 2, 2, 0]),
        ("Ett|ttL|", 4, 3, [2, 2, 0]),
    ],
)
def test_text_is_parsed_as_megatron_means_it(text, num_layers, num_stages, expected):
    layout = LayerLayout.from_megatron(text, num_layers=num_layers, num_stages=num_stages)
    assert sizes(layout) == expected
    assert layout.num_layers == num_layers
    assert layout.virtual_stages == len(expected) // num_stages


def test_chunks_are_in_virtual_pipeline_major_order():
    layout = LayerLayout.from_megatron("Et|tt|ttt|ttttL", num_layers=10, num_stages=2)
    assert layout.virtual_stages == 2
    assert layout.layers_of(0, 0) == (1,)
    assert layout.layers_of(1, 0) == (2, 3)
    assert layout.layers_of(0, 1) == (4, 5, 6)
    assert layout.layers_of(1, 1) == (7, 8, 9, 10)
    assert layout.owner_of(4) == (0, 1)
    assert layout.owner_of(10) == (1, 1)
    assert rank_sizes(layout) == [4, 6]


def test_empty_chunks_own_nothing():
    layout = LayerLayout.from_boundaries([0, 0, 2, 2, 4], num_stages=4)
    assert [layout.owner_of(n) for n in (1, 2, 3, 4)] == [(1, 0), (1, 0), (3, 0), (3, 0)]
    assert layout.layers_of(2) == ()


@pytest.mark.parametrize(
    ("boundaries", "num_stages", "virtual_stages", "text"),
    [
        ([0, 5, 8], 2, 1, "Et*5|t*3L"),
        ([0, 2, 3], 2, 1, "Ett|tL"),
        ([0, 0, 4], 2, 1, "E|t*4L"),
        ([0, 4, 4], 2, 1, "Et*4|L"),
        ([0, 4], 1, 1, "Et*4L"),
        ([0, 1, 3, 5, 7, 9, 9], 3, 2, "Et|(tt|)*4L"),
        ([0, 1, 1, 1, 1, 1, 2], 6, 1, "Et|(|)*4tL"),
    ],
)
def test_canonical_text_is_short(boundaries, num_stages, virtual_stages, text):
    layout = LayerLayout.from_boundaries(
        boundaries, num_stages=num_stages, virtual_stages=virtual_stages
    )
    assert layout.to_megatron() == str(layout) == text


@given(
    chunk_sizes=st.lists(st.lists(st.integers(0, 12), min_size=4, max_size=4), min_size=1),
    mtp=st.integers(0, 3),
)
def test_round_trip_keeps_everything(chunk_sizes, mtp):
    bounds = [0]
    for size in (size for row in chunk_sizes for size in row):
        bounds.append(bounds[-1] + size)
    layout = LayerLayout.from_boundaries(
        bounds, num_stages=4, virtual_stages=len(chunk_sizes), mtp_num_layers=mtp
    )
    again = LayerLayout.from_megatron(
        layout.to_megatron(), num_layers=layout.num_layers, num_stages=4
    )
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.to_megatron() == layout.to_megatron()
    owned = [
        number for vp in range(layout.virtual_stages) for r in range(4)
        for number in layout.layers_of(r, vp)
    ]  # fmt: skip
    assert owned == list(range(1, layout.num_layers + 1))
    assert all(n in layout.layers_of(*layout.owner_of(n)) for n in owned)


def test_equality_ignores_the_spelling():
    a = LayerLayout.from_megatron("Ettt|t,tL", num_layers=5, num_stages=2)
    b = LayerLayout.from_megatron("Et*3|(t)*2L", num_layers=5, num_stages=2)
    assert a == b == LayerLayout.from_boundaries([0, 3, 5], num_stages=2)
    assert len({a, b}) == 1
    assert a != LayerLayout.from_boundaries([0, 2, 5], num_stages=2)


def test_layout_cannot_be_changed_in_place():
    layout = LayerLayout.even(4, 2)
    layout.boundaries.append(9)
    assert layout.boundaries == [0, 2, 4]
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.num_stages = 3  # type: ignore[misc]


# ---------------------------------------------------------------- MTP


def test_mtp_is_kept_apart_from_the_decoder_layers():
    text = "Et*4|(tttt|)*14tmL"
    layout = LayerLayout.from_megatron(text, num_layers=61, num_stages=16)
    assert (layout.num_layers, layout.mtp_num_layers, layout.mtp_owner) == (61, 1, (15, 0))
    assert layout.to_megatron() == "Et*4|(t*4|)*14tmL"
    moved = layout.with_boundaries([0, 3, *range(7, 60, 4), 61])
    assert (moved.mtp_num_layers, moved.mtp_owner) == (1, (15, 0))


def test_mtp_stage_of_its_own_survives_the_round_trip():
    layout = LayerLayout.from_megatron("Ett|tt|mm|L", num_layers=4, num_stages=4)
    assert (layout.mtp_num_layers, layout.mtp_owner) == (2, (2, 0))
    assert layout.to_megatron() == "Ett|tt|mm|L"
    assert layout != LayerLayout.from_megatron("Ett|tt||mmL", num_layers=4, num_stages=4)


@pytest.mark.parametrize(
    ("text", "num_stages", "message"),
    [
        ("Ett|tt|m|mL", 4, "all m together in one chunk"),
        ("Ett|tmtL", 2, "all m together in one chunk, after every t"),
        ("Ettm|ttL", 2, "after every t"),
        ("Ett|ttm||L", 2, r"\(pp_rank 1, vp_stage 0\).*last vp_stage, 1"),
    ],
)
def test_mtp_in_the_wrong_place(text, num_stages, message):
    with pytest.raises(LayoutError, match=message):
        LayerLayout.from_megatron(text, num_layers=4, num_stages=num_stages)


def test_a_move_may_not_put_layers_behind_mtp():
    layout = LayerLayout.from_megatron("Ett|ttm|L", num_layers=4, num_stages=3)
    with pytest.raises(LayoutError, match=r"pp_rank 1.*1 decoder layers come after them"):
        layout.with_boundaries([0, 1, 3, 4])


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|tL", r"3 of 4 layers.*add 1 t"),
        ("Ett|tttL", r"5 of 4 layers.*remove 1 t"),
        ("Ett|t|tL", r"3 chunks on 2 pipeline stages.*use 2 or 4 chunks"),
        ("Ett|xtL", r"unknown letters 'x'"),
        ("Ett|t tL", r"unknown letters ' '"),
        ("E(tt|ttL", r"unknown letters '\('"),
        ("tE|tttL", r"E \(embedding\) must be the first"),
        ("Ett|tLt", r"L \(loss\) must be the last"),
        ("tt|ttL", r"0 E \(embedding\).*exactly 1"),
        ("Ett|EttL", r"2 E \(embedding\)"),
        ("Ett|tt", r"0 L \(loss\)"),
        ("E(t*9999)*9999|L", r"repeats to \d+ letters"),
        ("Et*99999999999|L", r"repeats to \d+ letters"),
        ("", r"0 E"),
    ],
)
def test_bad_text_says_what_is_wrong(text, message):
    with pytest.raises(LayoutError, match=message):
        LayerLayout.from_megatron(text, num_layers=4, num_stages=2)


@pytest.mark.parametrize(
    ("boundaries", "num_stages", "virtual_stages", "message"),
    [
        ([0, 2, 4], 3, 1, "3 boundaries, 4 wanted"),
        ([0, 3, 2, 4], 3, 1, r"\(pp_rank 1, vp_stage 0\) run backwards, from 3 to 2"),
        ([1, 2, 4], 2, 1, "first boundary is 1"),
        ([0, 2], 0, 1, "2 boundaries, 1 wanted"),
    ],
)
def test_bad_boundaries(boundaries, num_stages, virtual_stages, message):
    with pytest.raises(LayoutError, match=message):
        LayerLayout.from_boundaries(
            boundaries, num_stages=num_stages, virtual_stages=virtual_stages
        )


def test_asking_for_what_is_not_there():
    layout = LayerLayout.even(4, 2)
    with pytest.raises(LayoutError, match="no layer 5: the layout has 1 to 4"):
        layout.owner_of(5)
    with pytest.raises(LayoutError, match=r"no chunk \(pp_rank 2, vp_stage 0\)"):
        layout.layers_of(2)


# ---------------------------------------------------------------- cases from practice


def test_case_01_layers_that_do_not_divide():
    """30 layers on 4 stages once trained 28; here nothing is lost, and an even split is refused."""
    with pytest.raises(LayoutError, match=r"5 layers do not divide into 2.*'Et\*3\|ttL'"):
        LayerLayout.even(5, 2)
    assert rank_sizes(LayerLayout.nearly_even(5, 2)) == [3, 2]
    assert sum(rank_sizes(LayerLayout.nearly_even(30, 4))) == 30


def test_case_02_first_and_last_that_leave_layers_over():
    with pytest.raises(LayoutError, match=r"take 5 of 8 layers, 3 are left for 0 stages"):
        LayerLayout.first_last(8, 2, first_num_layers=2, last_num_layers=3)
    with pytest.raises(LayoutError, match=r"take 24 of 48 layers, 24 are left for 0 stages"):
        LayerLayout.first_last(48, 2, first_num_layers=11, last_num_layers=13)
    # Only the last count given: the rest is shared equally (the 61-layer model, last stage 13).
    assert rank_sizes(LayerLayout.first_last(61, 4, last_num_layers=13)) == [16, 16, 16, 13]
    interleaved = LayerLayout.first_last(16, 4, first_num_layers=2, last_num_layers=6,
                                         virtual_stages=2)  # fmt: skip
    assert sizes(interleaved) == [1, 2, 2, 3, 1, 2, 2, 3]


def test_case_04_virtual_stages_never_drop_layers():
    with pytest.raises(LayoutError, match="7 layers do not divide"):
        LayerLayout.even(7, 2, virtual_stages=2)
    layout = LayerLayout.nearly_even(80, 16, virtual_stages=2)
    assert set(sizes(layout)) == {2, 3}
    assert rank_sizes(layout) == [5] * 16


@pytest.mark.parametrize("text", ["Et|(tt|)*30L", "Et|(tt|)*29tt|L"])
def test_case_08_legal_layouts_of_61_layers(text):
    layout = LayerLayout.from_megatron(text, num_layers=61, num_stages=16)
    assert layout.virtual_stages == 2
    assert rank_sizes(layout) == [3] + [4] * 14 + [2]
    assert layout.layers_of(15, 1) == ()


@pytest.mark.parametrize("text", ["Et|(tt|)*29L|", "Et|(tt|)*29|L", "Et|(tt|)*28t|t|L"])
def test_case_08_the_message_names_the_count(text):
    with pytest.raises(LayoutError, match="59 of 61 layers"):
        LayerLayout.from_megatron(text, num_layers=61, num_stages=16)


def test_case_08_small_twin():
    layout = LayerLayout.from_megatron("Etttt|L", num_layers=4, num_stages=2)
    assert (layout.layers_of(0), layout.layers_of(1)) == ((1, 2, 3, 4), ())


def test_case_12_five_virtual_stages():
    layout = LayerLayout.from_megatron(
        "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", num_layers=80, num_stages=8
    )
    assert layout.virtual_stages == 5
    assert rank_sizes(layout) == [10, 10, 10, 11, 10, 10, 10, 9]


def test_even_reproduces_the_default_split():
    assert LayerLayout.even(8, 2).to_megatron() == "Et*4|t*4L"
    layout = LayerLayout.even(8, 2, virtual_stages=2)
    assert layout.layers_of(0, 0) + layout.layers_of(0, 1) == (1, 2, 5, 6)
    with pytest.raises(LayoutError, match="0 stages x 1 virtual stages"):
        LayerLayout.nearly_even(4, 0)

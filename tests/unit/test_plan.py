"""The plan of a move: every moved layer once, in one order, and back again."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynmo.errors import LayoutError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.plan import LayerMove, build_plan


@st.composite
def pairs(draw) -> tuple[LayerLayout, LayerLayout]:
    """Two layouts of one model over one pipeline."""
    stages = draw(st.integers(1, 5))
    virtual = draw(st.integers(1, 3))
    layers = draw(st.integers(0, 14))

    def layout() -> LayerLayout:
        inner = draw(
            st.lists(
                st.integers(0, layers), min_size=stages * virtual - 1, max_size=stages * virtual - 1
            )
        )
        return LayerLayout.from_boundaries(
            [0, *sorted(inner), layers], num_stages=stages, virtual_stages=virtual
        )

    return layout(), layout()


def owners(layout: LayerLayout) -> dict[int, tuple[int, int]]:
    return {n: layout.owner_of(n) for n in range(1, layout.num_layers + 1)}


@given(pairs())
def test_exactly_the_layers_that_change_their_owner_move_once(pair):
    old, new = pair
    plan = build_plan(old, new)
    before, after = owners(old), owners(new)
    assert plan.layer_numbers == tuple(n for n in before if before[n] != after[n])
    held = dict(before)
    for move in plan.moves:
        assert held[move.layer_number] == (move.src_pp_rank, move.src_vp_stage)
        held[move.layer_number] = (move.dst_pp_rank, move.dst_vp_stage)
    assert held == after


@given(pairs())
def test_the_order_is_one_for_all_ranks(pair):
    plan = build_plan(*pair)
    assert list(plan.layer_numbers) == sorted(plan.layer_numbers)
    for rank in range(plan.old.num_stages):
        mine = [m for m in plan.moves if rank in (m.src_pp_rank, m.dst_pp_rank)]
        either = {*plan.sent_by(rank), *plan.received_by(rank)}
        assert [m for m in plan.moves if m in either] == mine


@given(pairs())
def test_every_move_is_sent_once_and_received_once(pair):
    plan = build_plan(*pair)
    ranks = range(plan.old.num_stages)
    for side in (plan.sent_by, plan.received_by):
        listed = list(itertools.chain.from_iterable(side(rank) for rank in ranks))
        assert sorted(listed, key=lambda m: m.layer_number) == list(plan.moves)


@given(pairs())
def test_there_and_back_is_where_one_was(pair):
    old, new = pair
    there, back = build_plan(old, new), build_plan(new, old)
    assert back.layer_numbers == there.layer_numbers
    for one, other in zip(there.moves, back.moves, strict=True):
        assert (one.src_pp_rank, one.src_vp_stage) == (other.dst_pp_rank, other.dst_vp_stage)
        assert (one.dst_pp_rank, one.dst_vp_stage) == (other.src_pp_rank, other.src_vp_stage)
    assert build_plan(old, old).moves == ()


@given(pairs())
def test_handled_in_order_the_moves_never_lock_up(pair):
    """Ranks that take their moves one after another, both sides waiting, always come to an end."""
    plan = build_plan(*pair)
    todo = {
        rank: [m for m in plan.moves if rank in (m.src_pp_rank, m.dst_pp_rank)]
        for rank in range(plan.old.num_stages)
    }
    while any(todo.values()):
        ready = [
            moves[0]
            for rank, moves in todo.items()
            if moves and moves[0].src_pp_rank == rank and todo[moves[0].dst_pp_rank][0] == moves[0]
        ]
        assert ready, f"locked up: {todo}"
        for move in ready:
            for rank in {move.src_pp_rank, move.dst_pp_rank}:
                todo[rank].remove(move)


def test_an_example():
    plan = build_plan(
        LayerLayout.from_megatron("Ett|ttL", num_layers=4, num_stages=2),
        LayerLayout.from_megatron("E|ttttL", num_layers=4, num_stages=2),
    )
    assert plan.moves == (LayerMove(1, 0, 0, 1, 0), LayerMove(2, 0, 0, 1, 0))
    assert not plan.moves[0].is_local
    assert plan.sent_by(0) == plan.received_by(1) == plan.moves
    assert plan.sent_by(1) == plan.received_by(0) == ()


def test_a_change_of_chunk_on_one_rank_is_local():
    plan = build_plan(
        LayerLayout.from_megatron("Et|t|t|tL", num_layers=4, num_stages=2),
        LayerLayout.from_megatron("Et||tt|tL", num_layers=4, num_stages=2),
    )
    assert plan.moves == (LayerMove(2, 1, 0, 0, 1),)
    plan = build_plan(
        LayerLayout.from_megatron("Et||t|tL", num_layers=3, num_stages=2),
        LayerLayout.from_megatron("E||tt|tL", num_layers=3, num_stages=2),
    )
    assert plan.moves == (LayerMove(1, 0, 0, 0, 1),)
    assert plan.moves[0].is_local
    assert plan.sent_by(0) == plan.received_by(0) == plan.moves


def test_long_random_walks_conserve_every_layer():
    rng = random.Random(11)
    layout = LayerLayout.even(24, 4, virtual_stages=2)
    held = owners(layout)
    for _ in range(200):
        cuts = sorted(rng.choices(range(25), k=7))
        target = layout.with_boundaries([0, *cuts, 24])
        for move in build_plan(layout, target).moves:
            assert held[move.layer_number] == (move.src_pp_rank, move.src_vp_stage)
            held[move.layer_number] = (move.dst_pp_rank, move.dst_vp_stage)
        layout = target
        assert held == owners(layout)


@pytest.mark.parametrize(
    ("text", "layers", "stages", "words"),
    [
        ("Ettt|ttL", 5, 2, "5 layers, the running model has 4"),
        ("Et|t|ttL", 4, 3, "3 pipeline stages, the running model has 2"),
        ("Et|t|t|tL", 4, 2, "2 virtual stages, the running model has 1"),
        ("Ett|ttmL", 4, 2, "1 MTP layers, the running model has 0"),
    ],
)
def test_another_model_or_pipeline_is_refused_with_both_numbers(text, layers, stages, words):
    old = LayerLayout.from_megatron("Ett|ttL", num_layers=4, num_stages=2)
    new = LayerLayout.from_megatron(text, num_layers=layers, num_stages=stages)
    with pytest.raises(LayoutError) as error:
        build_plan(old, new)
    assert words in str(error.value)
    assert str(new) in str(error.value) and "Ett|ttL" in str(error.value)

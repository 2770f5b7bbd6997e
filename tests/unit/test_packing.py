import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts, predict_layout_ms
from megatron_dynmo.elastic.packing import PackingSettings, StageMap, advice, find_packing
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.layout import LayerLayout


def costs_of(times, num_microbatches=8, memory=0, activations=0):
    layers = tuple(
        LayerCost(i, t, 2 * t, memory_bytes=memory, activation_bytes=activations)
        for i, t in enumerate(times, start=1)
    )
    extra = ExtraCost(0.5, 1.0)
    return ModelCosts(layers, extra, extra, num_microbatches=num_microbatches)


def one_node_each(num_stages):
    return StageMap(tuple(frozenset({f"n{i}"}) for i in range(num_stages)))


def test_even_load_needs_all_stages():
    layout = LayerLayout.even(8, 4)
    assert find_packing(costs_of([1.0] * 8), layout, range(4), one_node_each(4),
                        PackingSettings()) is None  # fmt: skip


def test_load_that_collapsed_packs_and_keeps_the_ends():
    # Six frozen layers cost next to nothing: the two that are left set the pace of any split.
    costs = costs_of([0.001] * 6 + [4.0, 4.0])
    found = find_packing(costs, LayerLayout.even(8, 4), range(4), one_node_each(4),
                         PackingSettings())  # fmt: skip
    assert found.stages == (0, 3) and found.layout.num_stages == 2
    assert found.slowdown_pct <= 2.0
    assert found.iteration_ms == pytest.approx(predict_layout_ms(costs, found.layout))
    text = advice(found, range(4), one_node_each(4), 200.0, 90_000)
    assert "2 of 4 stages suffice" in text and "stages [1, 2], 2 ranks on n1, n2" in text
    assert "saves 10 GPU-hours" in text  # 2 ranks x 90,000 x 0.2 s


def test_load_that_grows_again_takes_stages_back():
    layout = LayerLayout.even(8, 2)
    found = find_packing(costs_of([1.0] * 8), layout, (0, 3), one_node_each(4), PackingSettings())
    assert found.stages == (0, 1, 2, 3) and found.layout.num_stages == 4
    assert "4 stages are needed again" in advice(found, (0, 3), one_node_each(4), 1.0, 10)


def test_stages_that_are_gone_are_done_without():
    costs, layout, limits = costs_of([1.0] * 8), LayerLayout.even(8, 2), PackingSettings()

    def back(active, *gone):
        found = find_packing(costs, layout, active, one_node_each(4), limits, None, frozenset(gone))
        return found and found.stages

    # Three stages take longer than all four may, but are far faster than two.
    assert back((0, 3), 2) == (0, 1, 3) and back((0, 3), 1) == (0, 2, 3)
    assert back((0, 1, 3), 2) is None and back((0, 3), 1, 2) is None
    # Where one heavy layer sets the pace the third stage would bring nothing.
    costs = costs_of([0.001] * 7 + [8.0])
    assert back((0, 3), 1) is None


def test_whole_nodes_alone_are_freed():
    costs = costs_of([0.001] * 6 + [4.0, 4.0])
    # Two stages on a node: both middle ones share it with an end.
    shared = StageMap(tuple(frozenset({name}) for name in ("a", "a", "b", "b")))
    assert shared.units() == []
    assert find_packing(costs, LayerLayout.even(8, 4), range(4), shared, PackingSettings()) is None
    six = StageMap(tuple(frozenset({name}) for name in ("a", "b", "c", "c", "d", "e")))
    assert six.units() == [frozenset({1}), frozenset({2, 3}), frozenset({4})]
    kept = StageMap(
        (frozenset("ab"), frozenset("c"), frozenset("cd"), frozenset("d"), frozenset("e"))
    )
    assert kept.units() == [frozenset({1, 2, 3})]
    assert kept.freed_nodes((0, 4)) == ("c", "d") and kept.kept_nodes((0, 4)) == ("a", "b", "e")


def test_fewest_stages_are_respected():
    costs = costs_of([0.001] * 6 + [4.0, 4.0])
    found = find_packing(costs, LayerLayout.even(8, 4), range(4), one_node_each(4),
                         PackingSettings(min_stages=3))  # fmt: skip
    assert found.stages == (0, 1, 3)


def test_memory_keeps_stages():
    costs = costs_of([0.001] * 6 + [4.0, 4.0], memory=10, activations=1)
    layout = LayerLayout.even(8, 4)

    def fewest(limit):
        found = find_packing(costs, layout, range(4), one_node_each(4),
                             PackingSettings(stage_memory_limit=limit))  # fmt: skip
        return len(found.stages) if found else 4

    assert fewest(100.0) == 2
    # On two stages the first one holds 6 layers and 2 micro-batches of each: 72 bytes.
    assert fewest(70.0) == 3
    with pytest.raises(BalanceError):
        fewest(5.0)


def test_the_slow_stage_leaves_first():
    costs = costs_of([0.001] * 6 + [4.0, 4.0])
    found = find_packing(costs, LayerLayout.even(8, 4), range(4), one_node_each(4),
                         PackingSettings(min_stages=3), [1.0, 0.5, 1.0, 1.0])  # fmt: skip
    assert found.stages == (0, 2, 3)


def test_few_microbatches_are_faster_on_fewer_stages():
    # One heavy layer bounds every split; a shorter pipeline only has a smaller bubble.
    costs = costs_of([0.001] * 7 + [5.0], num_microbatches=2)
    found = find_packing(costs, LayerLayout.even(8, 4), range(4), one_node_each(4),
                         PackingSettings(max_slowdown_pct=0.0))  # fmt: skip
    assert found.stages == (0, 3) and found.slowdown_pct <= 0


def test_all_come_back_where_the_schedule_is_slower_than_the_estimate_of_some():
    costs = costs_of([0.0, 1.5, 1.5, 1.0, 0.3], num_microbatches=5)
    found = find_packing(costs, LayerLayout.nearly_even(5, 2), [0, 3], one_node_each(4),
                         PackingSettings(max_slowdown_pct=0.0))  # fmt: skip
    assert found.stages == (0, 1, 2, 3) and found.slowdown_pct <= 0


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.5, 4.0]), min_size=4, max_size=12),
    num_stages=st.integers(3, 6),
    num_microbatches=st.integers(1, 12),
    slowdown=st.sampled_from([0.0, 2.0, 20.0]),
    share_nodes=st.booleans(),
    data=st.data(),
)
def test_a_plan_survives_its_next_check(
    times, num_stages, num_microbatches, slowdown, share_nodes, data
):
    names = [f"n{i // 2 if share_nodes else i}" for i in range(num_stages)]
    stage_map = StageMap(tuple(frozenset({name}) for name in names))
    freed = data.draw(st.sets(st.sampled_from(stage_map.units()))) if stage_map.units() else ()
    active = [s for s in range(num_stages) if not any(s in unit for unit in freed)]
    speeds = data.draw(st.lists(st.sampled_from([1.0, 1.0, 0.5]), min_size=num_stages,
                                max_size=num_stages))  # fmt: skip
    gone = frozenset(stage for unit in freed for stage in unit if data.draw(st.booleans()))
    costs = costs_of(times, num_microbatches)
    layout = LayerLayout.nearly_even(len(times), len(active))
    limits = PackingSettings(max_slowdown_pct=slowdown)
    found = find_packing(costs, layout, active, stage_map, limits, speeds, gone)
    if found is None:
        return
    assert found.stages[0] == 0 and found.stages[-1] == num_stages - 1
    assert set(found.stages) != set(active) and not gone & set(found.stages)
    assert gone or found.slowdown_pct <= slowdown + 1e-9
    assert found.layout.num_layers == len(times)
    assert found.layout.num_stages == len(found.stages)
    again = find_packing(costs, found.layout, found.stages, stage_map, limits, speeds, gone)
    assert again is None

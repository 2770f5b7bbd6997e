"""Policies on scenarios: what holds for every one of them, and what each is worth."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynmo.balancers.climb import Budget, climb
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.baselines import best_static, deepspeed_split, paper_diffusion
from megatron_dynmo.simulate.catalogue import SCENARIOS, make_scenario
from megatron_dynmo.simulate.model import TransformerModel
from megatron_dynmo.simulate.ours import Ours
from megatron_dynmo.simulate.pipeline import Case, Pipeline
from megatron_dynmo.simulate.policies import paper_policies, static_policies
from megatron_dynmo.simulate.run import compare, run_policy
from tests.unit.test_simulate_schedule import trace_of

NUM_ITERATIONS = 120
ONE_F_ONE_B, GPIPE = Pipeline(4, 8), Pipeline(4, 8, "gpipe")
INTERLEAVED = Pipeline(2, 8, "interleaved", 2)
CASES = [
    *((name, ONE_F_ONE_B) for name in SCENARIOS),
    *itertools.product(("moe", "early-exit"), (GPIPE, INTERLEAVED)),
]


def case_of(name: str, pipeline: Pipeline, num_layers: int = 16) -> Case:
    model = TransformerModel(num_layers, seq_length=SCENARIOS[name].seq_length)
    return Case(make_scenario(name).trace(model, NUM_ITERATIONS, seed=1), pipeline)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].schedule}")
def comparison(request):
    name, pipeline = request.param
    policies = [*static_policies(), *paper_policies(10), Ours()]
    return compare(case_of(name, pipeline), policies)


def test_every_layer_has_one_owner_in_order_at_every_iteration(comparison):
    case = comparison.case
    for outcome in comparison.outcomes:
        for (begin, boundaries), move in zip(outcome.spans, [None, *outcome.moves], strict=False):
            assert len(boundaries) == case.pipeline.num_chunks + 1
            assert (boundaries[0], boundaries[-1]) == (0, case.trace.num_layers)
            assert list(boundaries) == sorted(boundaries)
            if move is not None:
                assert move.new == boundaries
                assert move.iteration == case.trace.first_iteration + begin
        if outcome.spans:
            assert [move.old for move in outcome.moves] == [b for _, b in outcome.spans[:-1]]
        assert outcome.iteration_ms.shape == (NUM_ITERATIONS,)


def test_work_is_conserved_whatever_the_split(comparison):
    case = comparison.case
    trace = case.trace
    work = (
        trace.forward_ms.sum(axis=1) + trace.backward_ms.sum(axis=1)
        + trace.extra_forward_ms.sum(axis=1) + trace.extra_backward_ms.sum(axis=1)
    )  # fmt: skip
    for outcome in comparison.outcomes:
        for _, boundaries in outcome.spans:
            forward, backward = case.chunk_times(boundaries, slice(None))
            np.testing.assert_allclose((forward + backward).sum(axis=(1, 2)), work)


def test_ideal_is_a_lower_bound_of_all(comparison):
    ideal = comparison["ideal"].iteration_ms
    for outcome in comparison.outcomes:
        assert (outcome.iteration_ms >= ideal * (1 - 1e-9)).all(), outcome.policy
        assert 0 < comparison.fraction_of_ideal(outcome) <= 1 + 1e-9


def test_iteration_times_are_those_of_the_layout_in_force(comparison):
    case = comparison.case
    for outcome in comparison.outcomes:
        ends = [*(begin for begin, _ in outcome.spans[1:]), NUM_ITERATIONS]
        for (begin, boundaries), end in zip(outcome.spans, ends, strict=False):
            middle = (begin + end) // 2
            again = case.makespans(*case.chunk_times(boundaries, np.array([middle])))[0]
            assert outcome.iteration_ms[middle] == pytest.approx(again)


def test_ours_never_loses_more_than_its_moves_cost(comparison):
    static, ours = comparison["static"], comparison["ours"]
    assert ours.total_ms <= static.total_ms + ours.moving_ms
    assert float(ours.iteration_ms.sum()) <= static.total_ms * (1 + 1e-9)


def test_the_best_static_split_is_no_worse_than_the_other_static_ones(comparison):
    best = comparison["best-static"].total_ms
    assert best <= comparison["static"].total_ms
    assert best <= comparison["static-parameters"].total_ms
    assert not comparison["best-static"].moves


def test_gpu_hours_are_those_of_all_ranks(comparison):
    static = comparison["static"]
    hours = static.total_ms / 3.6e6 * comparison.case.pipeline.num_stages
    assert comparison.gpu_hours(static) == pytest.approx(hours)
    assert comparison.speedup_vs_static(static) == 1.0


def test_ours_gains_where_the_load_shifts_for_good():
    for name in ("freezing", "early-exit", "pruning"):
        case = case_of(name, Pipeline(4, 16), num_layers=32)
        comparison = compare(case, [*static_policies(), Ours()])
        ours = comparison["ours"]
        assert comparison.speedup_vs_static(ours) > 1.05, name
        assert ours.total_ms < comparison["best-static"].total_ms, name


def test_ours_uses_an_announced_step_before_the_first_slow_iteration():
    case = case_of("pruning", Pipeline(4, 16), num_layers=32)
    policy = Ours()
    outcome = run_policy(case, policy)
    steps = {case.trace.first_iteration + row for row in case.trace.announced}
    assert steps & {move.iteration for move in outcome.moves}
    assert len(policy.reasons) > 10
    assert all(reason and "\n" not in reason for _, reason in policy.reasons)


def test_ours_keeps_to_the_memory_limit():
    free = case_of("early-exit", Pipeline(4, 16), num_layers=32)
    free_peak = max(run_policy(free, Ours()).peak_memory_bytes)
    uniform_peak = free.peak_memory_bytes(free.uniform, slice(None)).max()
    assert free_peak > uniform_peak
    cap = (free_peak + uniform_peak) / 2
    capped = case_of("early-exit", Pipeline(4, 16, memory_cap_bytes=cap), num_layers=32)
    outcome = run_policy(capped, Ours())
    assert outcome.moves
    assert max(outcome.peak_memory_bytes) <= cap


# ---------------------------------------------------------------- baselines


def test_deepspeed_split_by_hand():
    assert deepspeed_split([1, 1, 1, 1], 2) == (0, 2, 4)
    assert deepspeed_split([10, 1, 1, 1], 2) == (0, 1, 4)
    # Filled from the front: nothing is left for the last part.
    assert deepspeed_split([3, 1, 1, 1], 3) == (0, 1, 4, 4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 5))
def test_deepspeed_split_is_within_its_tolerance_of_the_optimum(weights, num_parts):
    bounds = deepspeed_split(weights, num_parts, tolerance=1e-3)
    inner = itertools.combinations_with_replacement(range(len(weights) + 1), num_parts - 1)
    optimum = min(
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cut, len(weights))))
        for cut in inner
    )
    heaviest = max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))
    assert heaviest <= optimum + 1e-3 * sum(weights) / num_parts + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=4, max_size=20), st.integers(2, 4))
def test_paper_diffusion_keeps_order_and_is_never_worse(weights, num_stages):
    start = tuple(np.linspace(0, len(weights), num_stages + 1).astype(int).tolist())
    end = paper_diffusion(weights, start, gamma=0.0)
    assert (end[0], end[-1]) == (0, len(weights))
    assert list(end) == sorted(end)

    def heaviest(bounds):
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

    assert heaviest(end) <= heaviest(start)


def test_paper_diffusion_stops_within_gamma():
    # 6 and 4 layers: 20 % above the mean.
    assert paper_diffusion([1] * 10, (0, 6, 10), gamma=0.2) == (0, 6, 10)
    assert paper_diffusion([1] * 10, (0, 6, 10), gamma=0.1) == (0, 5, 10)


def test_best_static_is_the_best_of_all_splits_of_a_small_case():
    case = case_of("early-exit", Pipeline(3, 6), num_layers=9)
    cuts = itertools.combinations_with_replacement(range(10), 2)
    totals = [float(case.iteration_ms((0, *cut, 9), slice(None)).sum()) for cut in cuts]
    found = best_static(case, [case.uniform])
    assert float(case.iteration_ms(found, slice(None)).sum()) == pytest.approx(min(totals))


def test_climb_stops_at_its_budget_and_at_the_bottom():
    def distance(splits):
        return np.array([abs(bounds[1] - 7) + 1.0 for bounds in splits])

    assert climb((0, 2, 9), distance, Budget(1000)) == ((0, 7, 9), 1.0)
    assert climb((0, 2, 9), distance, Budget(4)) == ((0, 4, 9), 4.0)


def test_paper_policies_move_at_their_interval_whatever_it_costs():
    rng = np.random.default_rng(0)
    forward = rng.random((40, 12)) + 0.1
    case = Case(trace_of(forward, forward, memory=1e12), Pipeline(3, 6))
    for policy in paper_policies(7, gamma=0.0):
        outcome = run_policy(case, policy)
        assert {move.iteration for move in outcome.moves} <= {2, 9, 16, 23, 30, 37}
        assert len(outcome.moves) >= 3
        assert outcome.moving_ms > float(outcome.iteration_ms.sum())
    with pytest.raises(ConfigError, match="interval of 0"):
        paper_policies(0)


def test_ours_does_not_move_when_moving_cannot_pay():
    rng = np.random.default_rng(0)
    forward = rng.random((40, 12)) + 0.1
    case = Case(trace_of(forward, forward, memory=1e12), Pipeline(3, 6))
    assert not run_policy(case, Ours()).moves


def test_all_policies_see_the_same_noise_and_none_of_it_when_it_is_off():
    case = case_of("moe", Pipeline(4, 8))
    np.testing.assert_array_equal(case.measured(5), case.measured(5))
    assert not np.array_equal(case.measured(5), case.measured(6))
    quiet = Case(case.trace, Pipeline(4, 8, measuring_noise=0.0))
    assert (quiet.measured(5) == 1).all()


def test_a_hundred_stages_over_many_iterations():
    # The full size, 1,000 stages x 10,000 layers x 1,000 iterations, is run by hand.
    model = TransformerModel(1000)
    trace = make_scenario("sparse-attention").trace(model, 40)
    case = Case(trace, Pipeline(100, 200))
    comparison = compare(case, [*static_policies(), *paper_policies(10), Ours()])
    assert comparison["paper-partition"].total_ms < comparison["static"].total_ms
    assert comparison["best-static"].total_ms < comparison["static"].total_ms

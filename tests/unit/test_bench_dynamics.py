"""What the benchmarks of the dynamics make of recorded runs."""

import dataclasses

import numpy as np
import pytest

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.simulate.pipeline import Case, Pipeline
from scripts.bench_dynamics import levels, speedup_by_turns
from scripts.convergence import Learned, flops_of_layer, shares_of_dense
from scripts.dynamics_kinds import DENSE_TRIAL, EMULATED_LAYERS, EMULATION, KINDS, TRIALS, Trial
from scripts.dynamics_limits import limits_of
from scripts.dynamics_runs import FIRST_ITERATION, Run, emulated_trace


def run_of(factors, tmp_path, **kwargs):
    return Run(tmp_path, kwargs.pop("events", []), np.array(factors), is_emulated=True)


def half_frozen(iterations):
    """Factors of a run whose first half of the layers loses its backward in the middle."""
    factors = np.ones((iterations, EMULATED_LAYERS, 2))
    factors[iterations // 2 :, : EMULATED_LAYERS // 2, 1] = 0.0
    return factors


def test_the_trace_has_the_costs_of_the_emulation_times_the_factors(tmp_path):
    trace = emulated_trace(run_of(half_frozen(10), tmp_path), EMULATION)
    assert trace.first_iteration == FIRST_ITERATION and trace.num_iterations == 8
    assert trace.backward_ms[0].tolist() == [4.0] * 24
    assert trace.backward_ms[-1].tolist() == [0.0] * 12 + [4.0] * 12
    assert trace.forward_ms[-1].tolist() == [2.0] * 24


def limits_of_half_frozen(tmp_path):
    trace = emulated_trace(run_of(half_frozen(10), tmp_path), EMULATION)
    case = Case(trace, Pipeline(num_stages=8, num_microbatches=16, p2p_ms=0.7))
    times = case.iteration_ms(case.uniform, slice(None)) + 4.0
    static_ms = {"mean": float(times.mean()), "settled": float(times[-1])}
    return limits_of(case, 4.0, static_ms, settled_rows=3)


def test_no_limit_is_below_what_it_limits(tmp_path):
    limits = limits_of_half_frozen(tmp_path)
    assert limits.closed_form == pytest.approx(1.0)
    assert 1.0 < limits.oracle <= limits.ideal
    assert limits.oracle < limits.settled_oracle <= limits.settled_ideal
    assert limits.work_left == pytest.approx((12 * 2 + 12 * 6) / (24 * 6))


def test_the_reason_names_the_bound_where_no_split_can_reach_the_abstract(tmp_path):
    limits = limits_of_half_frozen(tmp_path)
    cell = {"speedup": 1.1, "settled_speedup": 1.2, "paper_speedup": 99.0}
    assert f"exceeds {limits.settled_ideal:.2f}" in limits.why(cell)
    assert "abstract" not in limits.why(cell | {"paper_speedup": 1.15})


def test_flops_of_a_run_without_a_dynamic_are_those_of_the_dense_model():
    assert shares_of_dense(np.ones((3, 6, 2)), DENSE_TRIAL) == pytest.approx([1.0, 1.0, 1.0])
    frozen = np.ones((1, 6, 2))
    frozen[0, :3, 1] = 0.0  # half of the layers keep a third of their work
    assert 2 / 3 < shares_of_dense(frozen, DENSE_TRIAL)[0] < 0.75


def test_a_run_is_kept_for_the_same_flags_only(tmp_path):
    run = Learned(2, [3.0, 2.0], np.array([0.5, 1.0]))
    run.save(tmp_path / "learned.json", ["--a", "1"])
    kept = Learned.kept(tmp_path / "learned.json", ("--a", "1"))
    assert kept is not None
    assert (kept.iterations, kept.losses, kept.flops.tolist()) == (2, [3.0, 2.0], [0.5, 1.0])
    assert Learned.kept(tmp_path / "learned.json", ("--a", "2")) is None
    assert Learned.kept(tmp_path / "other.json", ("--a", "1")) is None


def test_a_token_of_a_moe_layer_costs_the_mlps_of_its_experts():
    moe = Trial("MoE", lambda iterations: (), 0.0, model=("--num-experts", "4"))
    one = dataclasses.replace(moe, model=(*moe.model, "--moe-router-topk", "1"))
    two = dataclasses.replace(moe, model=(*moe.model, "--moe-router-topk", "2"))
    # The router is a column for each expert.
    assert flops_of_layer(one.model) - flops_of_layer(()) == 2 * 96 * 4
    assert flops_of_layer(two.model) - flops_of_layer(one.model) == 2 * 2 * 96 * 384
    assert shares_of_dense(np.ones((1, 6, 2)), two)[0] > 1.4


def test_a_level_is_the_state_that_the_measured_iteration_was_under(tmp_path):
    def profile(iteration, ms):
        layer = {"forward_ms": ms, "backward_ms": 2 * ms}
        return {"iteration": iteration, "event": "profile", "layers": [layer]}

    change = {"iteration": 6, "event": "dynamics", "time_s": 0.0, "kind": "x", "sparsity": 0.5}
    run = run_of([], tmp_path, events=[profile(3, 4.0), profile(6, 4.0), change, profile(9, 1.0)])
    assert [(level["iteration"], level["state"].get("sparsity")) for level in levels(run)] == [
        (3, None),
        (6, None),  # changed after it
        (9, 0.5),
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("iterations", [12, 40, 60])
def test_the_flags_of_every_kind_are_right(kind, iterations):
    for flags in (kind.flags, kind.emulated_flags or kind.flags):
        assert DynMoConfig.from_argv(flags(iterations)).dynamics


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_the_flags_of_every_trial_are_right(trial):
    assert DynMoConfig.from_argv(trial.flags(300)).dynamics


def test_drift_of_the_machine_does_not_tell_two_layouts_apart():
    """The machine slows down by a tenth a block; every second block takes a quarter longer."""
    first = [40, 44, 48, 52, 56, 60]
    ms = {
        at + k: (10.0 + number) * (1.25 if number % 2 else 1.0) * (9.0 if k == 1 else 1.0)
        for number, at in enumerate(first)
        for k in range(1, 5)
    }
    assert speedup_by_turns(ms, first) == pytest.approx(1.25, rel=0.02)

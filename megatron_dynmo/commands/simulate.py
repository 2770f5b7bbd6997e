"""`dynmo simulate`: what balancing would bring to a run, without a GPU."""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_dynmo.commands.simulate_plot import check_plot_path, write_plot
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.catalogue import SCENARIOS, make_scenario
from megatron_dynmo.simulate.model import TransformerModel
from megatron_dynmo.simulate.ours import Ours
from megatron_dynmo.simulate.pipeline import Case, Pipeline
from megatron_dynmo.simulate.policies import Policy, paper_policies, static_policies
from megatron_dynmo.simulate.recorded import read_recording
from megatron_dynmo.simulate.report import comparison_json
from megatron_dynmo.simulate.run import Comparison, compare
from megatron_dynmo.simulate.run import Progress as Report
from megatron_dynmo.simulate.trace import CostTrace
from megatron_dynmo.trigger import TriggerSettings

_DEFAULTS = {"layers": 32, "stages": 8, "iterations": 1000}
_MICROBATCHES_PER_STAGE = 4
_PAPER_DECISIONS = 20  # of a run, unless the user sets the interval
_NUM_MOVES_SHOWN = 5
_OF_SCENARIOS = ("layers", "iterations", "hidden", "seq_length", "vocab_size", "forward_ms", "set")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `simulate` to the `dynmo` command.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "simulate",
        help="simulate static and dynamic balancing of a scenario or a recorded run",
        description="Simulate a pipeline whose layers change cost while training, under static "
        "layouts, the paper's balancers and ours, and compare iteration times and GPU-hours.",
        epilog="Scenarios and their settings (--set): "
        + "; ".join(f"{name}: {', '.join(asdict(kind()))}" for name, kind in SCENARIOS.items()),
    )
    parser.add_argument(
        "scenario", metavar="SCENARIO", nargs="?", help=f"one of {', '.join(SCENARIOS)}"
    )
    parser.add_argument(
        "--events", metavar="FILE", type=Path, help="events.jsonl of a real run, not a scenario"
    )
    _add_run_arguments(parser)
    _add_model_arguments(parser)
    _add_policy_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write FILE.png or FILE.html")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print the comparison.

    Args:
        args: As parsed by the parser of `add_parser`.

    Returns:
        0; what cannot work is raised.

    Raises:
        ConfigError: Arguments or a file that cannot be used; says what to change.
    """
    if args.plot is not None:
        check_plot_path(args.plot)
    case, source, title = _case(args)
    with _progress_bar() as progress:
        comparison = compare(case, _policies(args, case), progress)
    if args.plot is not None:
        write_plot(args.plot, comparison, title)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if args.json:
        console.print_json(data=comparison_json(comparison, source), indent=None, highlight=False)
    else:
        _print_table(Console(highlight=False), comparison, title)
    return 0


# ------------------------------------------------------------------------ arguments


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--layers", metavar="N", type=int, help=f"default: {_DEFAULTS['layers']}")
    add("--stages", metavar="N", type=int, help=f"pipeline size, default: {_DEFAULTS['stages']}")
    add("--virtual-stages", metavar="N", type=int, help="chunks on each rank, default: 1")
    add("--microbatches", metavar="N", type=int, help="default: 4 for each stage")
    add("--iterations", metavar="N", type=int, help=f"default: {_DEFAULTS['iterations']}")
    add("--schedule", metavar="NAME", help="1f1b, interleaved or gpipe; default: as Megatron")
    add("--p2p-ms", metavar="MS", type=float, default=0.0, help="one hop, default: %(default)s")
    add(
        "--ranks-per-stage",
        metavar="N",
        type=int,
        default=1,
        help="GPUs of a stage, for GPU-hours (default: %(default)s)",
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scenario")
    add = group.add_argument
    add("--hidden", metavar="N", type=int, help="hidden size, default: 2048")
    add("--seq-length", metavar="N", type=int, help="default: what suits the scenario")
    add("--vocab-size", metavar="N", type=int, help="0 for no output layer, default: 51200")
    add("--forward-ms", metavar="MS", type=float, help="forward of a dense layer, default: 10")
    add("--set", metavar="NAME=VALUE", action="append", help="a setting of the scenario; repeat")
    add("--seed", metavar="N", type=int, default=0, help="default: %(default)s")


def _add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("policies")
    add = group.add_argument
    add(
        "--paper-interval",
        metavar="N",
        type=int,
        help="iterations between the paper's decisions, default: 20 decisions in a run",
    )
    add("--paper-gamma", metavar="X", type=float, default=0.05, help="default: %(default)s")
    add(
        "--min-gain-pct",
        metavar="X",
        type=float,
        default=TriggerSettings().min_gain_pct,
        help="of ours, default: %(default)s",
    )
    add("--move-fixed-ms", metavar="MS", type=float, default=200.0, help="default: %(default)s")
    add(
        "--move-gb-per-s",
        metavar="X",
        type=float,
        default=25.0,
        help="bandwidth of a rank for layers, default: %(default)s",
    )
    add("--memory-cap-gb", metavar="X", type=float, help="of a rank, kept to by ours")


# ------------------------------------------------------------------------ from arguments to work


def _case(args: argparse.Namespace) -> tuple[Case, dict[str, Any], str]:
    """(case, source for the JSON, title)."""
    if (args.scenario is None) == (args.events is None):
        raise ConfigError(
            f"give a scenario ({', '.join(SCENARIOS)}) or --events FILE, and not both"
        )
    if args.events is not None:
        return _recorded_case(args)
    trace, source = _scenario_trace(args)
    stages = _or(args.stages, _DEFAULTS["stages"])
    case = Case(trace, _pipeline(args, stages, 1, _MICROBATCHES_PER_STAGE * stages))
    return case, source, _title(args.scenario, case)


def _scenario_trace(args: argparse.Namespace) -> tuple[CostTrace, dict[str, Any]]:
    settings = {}
    for text in args.set or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write NAME=VALUE, such as --set begin=0.2")
        settings[name.strip().replace("-", "_")] = value.strip()
    scenario = make_scenario(args.scenario, settings)
    given = {
        name: getattr(args, name)
        for name in ("hidden", "seq_length", "vocab_size", "forward_ms")
        if getattr(args, name) is not None
    }
    layers = _or(args.layers, _DEFAULTS["layers"])
    model = TransformerModel(layers, **{"seq_length": scenario.seq_length, **given})
    iterations = _or(args.iterations, _DEFAULTS["iterations"])
    if iterations < 1:
        raise ConfigError(f"--iterations {iterations}: at least 1 is needed")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: at least 0 is needed")
    source = {
        "scenario": args.scenario,
        "settings": asdict(scenario),
        "model": asdict(model),
        "seed": args.seed,
    }
    return scenario.trace(model, iterations, args.seed), source


def _recorded_case(args: argparse.Namespace) -> tuple[Case, dict[str, Any], str]:
    unused = [name for name in _OF_SCENARIOS if getattr(args, name) is not None]
    if unused:
        flag = "--" + unused[0].replace("_", "-")
        raise ConfigError(f"{flag} is for scenarios: with --events the file says it; leave it out")
    recording = read_recording(args.events)
    stages = _or(args.stages, recording.num_stages)
    if stages is None:
        raise ConfigError(f"{args.events} does not say the number of stages; give --stages")
    # Virtual stages are the recorded ones unless another pipeline is asked for.
    virtual = recording.virtual_stages if args.stages is None else None
    microbatches = _or(args.microbatches, recording.num_microbatches)
    if microbatches is None:
        raise ConfigError(
            f"{args.events} does not say the number of micro-batches; give --microbatches"
        )
    case = Case(recording.trace, _pipeline(args, stages, virtual or 1, microbatches))
    return case, {"events": str(args.events)}, _title(args.events.name, case)


def _pipeline(
    args: argparse.Namespace, stages: int, virtual_stages: int, microbatches: int
) -> Pipeline:
    virtual_stages = _or(args.virtual_stages, virtual_stages)
    schedule = args.schedule or ("interleaved" if virtual_stages > 1 else "1f1b")
    cap = args.memory_cap_gb
    return Pipeline(
        stages,
        _or(args.microbatches, microbatches),
        schedule,
        virtual_stages,
        p2p_ms=args.p2p_ms,
        move_fixed_ms=args.move_fixed_ms,
        move_gb_per_s=args.move_gb_per_s,
        memory_cap_bytes=None if cap is None else cap * 1e9,
        ranks_per_stage=args.ranks_per_stage,
    )


def _policies(args: argparse.Namespace, case: Case) -> list[Policy]:
    interval = _or(args.paper_interval, max(1, case.trace.num_iterations // _PAPER_DECISIONS))
    if not args.paper_gamma >= 0:
        raise ConfigError(f"--paper-gamma {args.paper_gamma}: at least 0 is needed")
    ours = Ours(TriggerSettings(min_gain_pct=args.min_gain_pct))
    return [*static_policies(), *paper_policies(interval, args.paper_gamma), ours]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# ------------------------------------------------------------------------ what people see


def _title(name: str, case: Case) -> str:
    p = case.pipeline
    chunks = f" x {p.virtual_stages} virtual" if p.virtual_stages > 1 else ""
    return (
        f"{name}: {case.trace.num_layers} layers on {p.num_stages} stages{chunks}, "
        f"{p.num_microbatches} micro-batches, {case.trace.num_iterations} iterations, {p.schedule}"
    )


def _print_table(console: Console, comparison: Comparison, title: str) -> None:
    table = Table(
        title=f"{title} (simulated)", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("policy", no_wrap=True)
    for column in ("mean ms", "speed-up", "of ideal", "moves", "moving s", "GPU-h", "peak GB"):
        table.add_column(column, justify="right", no_wrap=True)
    cap = comparison.case.pipeline.memory_cap_bytes or math.inf
    highest = 0.0
    for outcome in comparison.outcomes:
        peak = max(outcome.peak_memory_bytes, default=0.0)
        highest = max(highest, peak)
        table.add_row(
            outcome.policy,
            f"{outcome.iteration_ms.mean():,.1f}",
            f"{comparison.speedup_vs_static(outcome):.3f}x",
            f"{comparison.fraction_of_ideal(outcome):.1%}",
            str(len(outcome.moves)) if outcome.spans else "",
            f"{outcome.moving_ms / 1e3:,.1f}" if outcome.spans else "",
            f"{comparison.gpu_hours(outcome):,.2f}",
            f"{peak / 1e9:,.1f}{'!' if peak > cap else ''}" if outcome.spans else "",
        )
    console.print(table)
    if highest > cap:
        console.print(f"! holds more than the {cap / 1e9:g} GB allowed")
    moves = comparison["ours"].moves
    for move in moves[:_NUM_MOVES_SHOWN]:
        console.print(f"ours, before iteration {move.iteration}: {move.reason}", markup=False)
    if len(moves) > _NUM_MOVES_SHOWN:
        console.print(f"and {len(moves) - _NUM_MOVES_SHOWN} more moves (all with --json)")


@contextmanager
def _progress_bar() -> Iterator[Report]:
    """Show a bar on a terminal's standard error, nothing elsewhere; gone when done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("static", total=None)

        def update(policy: str, done: int, total: int) -> None:
            bar.update(task, description=policy, completed=done, total=total)

        yield update

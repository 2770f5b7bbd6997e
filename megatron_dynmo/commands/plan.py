"""`dynmo plan`: the best layout for measured costs, a model card or Megatron's arguments."""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_dynmo.commands.plan_table import print_check, print_plan
from megatron_dynmo.cost import LayerCost, ModelCosts
from megatron_dynmo.cost_file import read_costs, write_costs
from megatron_dynmo.errors import ConfigError, LayoutError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.planner.advice import advice
from megatron_dynmo.planner.analytic import DEFAULT_FLOPS_PER_BYTE, analytic_costs, assumptions
from megatron_dynmo.planner.layout_report import report_layout
from megatron_dynmo.planner.layout_text import parse_layout
from megatron_dynmo.planner.megatron_line import read_line
from megatron_dynmo.planner.megatron_setup import MICROBATCHES_PER_STAGE
from megatron_dynmo.planner.model import Model
from megatron_dynmo.planner.model_card import read_card
from megatron_dynmo.planner.question import Question
from megatron_dynmo.planner.report import make_plan

_BYTES_PER_GB = 1e9
_NOT_LEGAL = 1
# How a model is trained of which there is only the card.
_RUN_OF_A_CARD = ("--bf16", "--hidden-dropout", "0")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `plan` to the `dynmo` command.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "plan",
        help="find the best layout for measured costs or for Megatron's arguments",
        description="Say which layers each pipeline stage should own, what that brings, and what "
        "stands in the way of more. Needs no GPU and no Megatron.",
        epilog="Megatron's own arguments go behind --: dynmo plan --stages 8 -- --num-layers 80 "
        "--hidden-size 8192 ...",
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--costs", metavar="FILE", type=Path, help="costs.json, as measured")
    source.add_argument("--model", metavar="FILE", type=Path, help="config.json of a model card")
    add("--check", metavar="LAYOUT", help="is it legal, and what does each stage get")
    add("--current", metavar="LAYOUT", help="the present layout; default: the nearest to even")
    add("--stages", metavar="P", type=int, help="pipeline size; default: that of the arguments")
    add("--virtual-stages", metavar="V", type=int, help="chunks on each rank, default: 1")
    add("--num-layers", metavar="N", type=int, help="decoder layers, for --check without costs")
    add("--memory-cap-gb", metavar="X", type=float, help="allowed on each rank, in 1e9 bytes")
    add("--min-layers", metavar="N", type=int, default=1, help="of a chunk, default: %(default)s")
    add("--microbatches", metavar="M", type=int, help="of an iteration, on one data-parallel rank")
    add("--world-size", metavar="N", type=int, help="ranks of the job, default: the fewest")
    add("--device-tflops", metavar="X", type=float, help="that a rank reaches, to get times in ms")
    add(
        "--device-flops-per-byte",
        metavar="X",
        type=float,
        default=DEFAULT_FLOPS_PER_BYTE,
        help="FLOPs while one byte is moved, default: %(default)g",
    )
    add("--write-costs", metavar="FILE", type=Path, help="write the costs used as costs.json")
    add("--json", action="store_true", help="print one JSON object")
    add("megatron_args", metavar="MEGATRON_ARGS", nargs="*", help="behind --")
    parser.set_defaults(run=run, unknown_hint="Megatron's arguments go behind --")


def run(args: argparse.Namespace) -> int:
    """Plan and print.

    Args:
        args: As parsed by the parser of `add_parser`.

    Returns:
        0, or 1 when the layout of --check is not legal.

    Raises:
        ConfigError: Arguments or a file that cannot be used; says what to change.
        LayoutError: The present layout is not legal.
        BalanceError: No layout fits.
    """
    _check_numbers(args)
    if args.check is not None and args.current is not None:
        raise ConfigError("--check and --current both name the present layout: give one of them")
    if args.check is None and not _has_costs(args):
        raise ConfigError("give --costs FILE, --model FILE, or Megatron's arguments behind --")
    if not _has_costs(args):
        return _check_counts(args)
    subject = _subject(args)
    if args.check is None:
        _require_enough_layers(subject.question)
    if args.write_costs is not None:
        _write(args.write_costs, subject.question.costs)
    if args.check is not None:
        return _check(args, subject)
    _answer(args, subject, _present(args, subject))
    return 0


# ------------------------------------------------------------------------ what is planned


@dataclass(frozen=True)
class _Subject:
    """What is planned, and what to say besides the layout.

    Attributes:
        question: costs and limits.
        unit: of times.
        current: layout that Megatron's arguments ask for.
        model: the model, where it is known.
        assumptions: behind the numbers.
        warnings: what was not understood.
    """

    question: Question
    unit: str = "ms"
    current: LayerLayout | None = None
    model: Model | None = None
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def _subject(args: argparse.Namespace) -> _Subject:
    return _measured(args) if args.costs is not None else _modelled(args)


def _measured(args: argparse.Namespace) -> _Subject:
    if args.megatron_args:
        raise ConfigError("--costs and Megatron's arguments exclude each other: give one of them")
    stages = _stages(args)
    costs = read_costs(args.costs)
    notes: tuple[str, ...] = ()
    if args.microbatches is not None:
        costs = replace(costs, num_microbatches=args.microbatches)
    elif "num_microbatches" not in json.loads(args.costs.read_text(encoding="utf-8")):
        costs = replace(costs, num_microbatches=MICROBATCHES_PER_STAGE * stages)
        notes = (
            f"{costs.num_microbatches} micro-batches, {MICROBATCHES_PER_STAGE} for each stage: "
            f"{args.costs} does not say; give --microbatches for another number",
        )
    virtual = args.virtual_stages or 1
    mtp = 0
    if args.current is not None:
        layout = _layout(args, args.current, len(costs.layers), stages, 0)
        virtual, mtp = args.virtual_stages or layout.virtual_stages, layout.mtp_num_layers
    question = Question(
        costs, stages, virtual, args.min_layers, _cap_bytes(args), mtp_layers=mtp
    )  # fmt: skip
    return _Subject(question, assumptions=notes)


def _modelled(args: argparse.Namespace) -> _Subject:
    card, card_warnings = (None, []) if args.model is None else read_card(args.model)
    words, notes = args.megatron_args, []
    if not words:
        words = list(_RUN_OF_A_CARD)
        notes.append("bf16 without dropout, as no arguments behind -- say otherwise")
    line = read_line(
        words, card=card, num_stages=args.stages, virtual_stages=args.virtual_stages,
        num_microbatches=args.microbatches, world_size=args.world_size,
    )  # fmt: skip
    modelled = analytic_costs(
        line.model, line.setup, line.num_stages, tflops=args.device_tflops,
        flops_per_byte=args.device_flops_per_byte,
    )  # fmt: skip
    question = Question(
        modelled.costs, line.num_stages, line.virtual_stages, args.min_layers, _cap_bytes(args),
        mtp_layers=line.model.mtp_layers, transient_bytes=modelled.transient_bytes,
        output_share=modelled.output_share,
    )  # fmt: skip
    fixed = assumptions(line.model, line.setup, flops_per_byte=args.device_flops_per_byte)
    if modelled.unit == "relative":
        fixed.insert(
            0, "1 unit is the forward of the average decoder layer; --device-tflops for ms"
        )
    return _Subject(
        question, "ms" if modelled.unit == "ms" else "units", line.current, line.model,
        (*notes, *line.notes, *fixed), (*card_warnings, *line.warnings),
    )  # fmt: skip


def _present(args: argparse.Namespace, subject: _Subject) -> LayerLayout | None:
    """The present layout: as typed, or as Megatron's arguments say."""
    if args.current is None:
        return subject.current
    question = subject.question
    return _layout(
        args, args.current, len(question.costs.layers), question.num_stages, question.mtp_layers
    )


def _layout(
    args: argparse.Namespace, text: str, num_layers: int, stages: int, mtp_layers: int
) -> LayerLayout:
    if args.num_layers not in (None, num_layers):
        raise ConfigError(
            f"--num-layers {args.num_layers}, but the costs are of {num_layers} layers"
        )
    return parse_layout(text, num_layers=num_layers, num_stages=stages, mtp_layers=mtp_layers)


# ------------------------------------------------------------------------ answers


def _answer(
    args: argparse.Namespace, subject: _Subject, current: LayerLayout | None, **more: Any
) -> None:
    plan = make_plan(subject.question, current)
    findings = advice(subject.question, plan, subject.unit)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if not args.json:
        print_plan(console, plan, subject.unit, findings)
        _print_notes(console, subject)
        return
    document = more | plan.as_json() | {"findings": findings, "unit": subject.unit}
    document["num_microbatches"] = subject.question.costs.num_microbatches
    document |= {"assumptions": subject.assumptions, "warnings": subject.warnings}
    if subject.model is not None:
        document["parameters"] = {
            "total": subject.model.num_parameters,
            "active": subject.model.num_active,
            "mtp": subject.model.num_mtp_parameters,
        }
    console.print_json(data=document, indent=None, highlight=False)


def _print_notes(console: Console, subject: _Subject) -> None:
    if subject.model is not None:
        mtp = subject.model.num_mtp_parameters
        more = f", and {mtp:,} in {subject.model.mtp_layers} MTP layers" if mtp else ""
        console.print(
            f"parameters {subject.model.num_parameters:,}, of which a token uses "
            f"{subject.model.num_active:,}{more}"
        )
    for note in subject.assumptions:
        console.print(f"assumed: {note}")
    for warning in subject.warnings:
        console.print(f"warning: {warning}")


def _check(args: argparse.Namespace, subject: _Subject) -> int:
    """Say whether a layout is legal, and what it makes of the costs."""
    question = subject.question
    try:
        layout = _layout(
            args, args.check, len(question.costs.layers), question.num_stages, question.mtp_layers
        )
        _require_same_chunks(args, layout)
    except LayoutError as error:
        return _say_not_legal(args, error)
    if not args.json:
        console = Console(soft_wrap=True, markup=False, highlight=False)
        report = report_layout(question.costs, layout, question.transient_bytes)
        print_check(console, report, subject.unit)
    question = replace(
        question, virtual_stages=layout.virtual_stages, mtp_layers=layout.mtp_num_layers
    )
    _answer(args, replace(subject, question=question), layout, legal=True)
    return 0


def _check_counts(args: argparse.Namespace) -> int:
    """Say whether a layout is legal by its counts alone, every layer the same."""
    if args.num_layers is None or args.num_layers < 1:
        raise ConfigError("--check without costs needs --num-layers N, the model's decoder layers")
    try:
        layout = parse_layout(args.check, num_layers=args.num_layers, num_stages=_stages(args))
        _require_same_chunks(args, layout)
    except LayoutError as error:
        return _say_not_legal(args, error)
    layers = tuple(LayerCost(number, 1.0, 2.0) for number in range(1, args.num_layers + 1))
    report = report_layout(ModelCosts(layers, num_microbatches=layout.num_stages), layout)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if not args.json:
        print_check(console, report, None)
        return 0
    document = {
        "legal": True,
        "layout": layout.to_megatron(),
        "boundaries": layout.boundaries,
        "virtual_stages": layout.virtual_stages,
        "mtp_layers": layout.mtp_num_layers,
        "stages": [
            {"pp_rank": rank.pp_rank, "layers": rank.num_layers, "share": rank.share}
            for rank in report.ranks
        ],
    }
    console.print_json(data=document, indent=None, highlight=False)
    return 0


def _require_same_chunks(args: argparse.Namespace, layout: LayerLayout) -> None:
    """Refuse a layout with other virtual stages than the command line asks for."""
    if args.virtual_stages is not None and args.virtual_stages != layout.virtual_stages:
        wanted = layout.num_stages * args.virtual_stages
        raise LayoutError(
            f"{layout.num_stages * layout.virtual_stages} chunks on {layout.num_stages} pipeline "
            f"stages: --virtual-stages {args.virtual_stages} needs {wanted}"
        )


def _say_not_legal(args: argparse.Namespace, error: LayoutError) -> int:
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if args.json:
        console.print_json(data={"legal": False, "reason": str(error)}, indent=None)
    else:
        console.print(f"not legal: {error}")
    return _NOT_LEGAL


# ------------------------------------------------------------------------ arguments


def _has_costs(args: argparse.Namespace) -> bool:
    return args.costs is not None or args.model is not None or bool(args.megatron_args)


def _stages(args: argparse.Namespace) -> int:
    if args.stages is None:
        raise ConfigError("the number of stages is missing: give --stages P")
    stages: int = args.stages
    return stages


def _cap_bytes(args: argparse.Namespace) -> float | None:
    return None if args.memory_cap_gb is None else args.memory_cap_gb * _BYTES_PER_GB


def _require_enough_layers(question: Question) -> None:
    """Refuse more chunks than layers, in the words of the command line."""
    num_layers = len(question.costs.layers)
    chunks = question.num_stages * question.virtual_stages
    if num_layers < question.min_layers * chunks:
        virtual = f" x {question.virtual_stages} virtual" if question.virtual_stages > 1 else ""
        raise ConfigError(
            f"{num_layers} layers cannot give each of {question.num_stages} stages{virtual} at "
            f"least {question.min_layers}; use at most {num_layers // question.min_layers} chunks, "
            f"or --min-layers {num_layers // chunks}"
        )


def _check_numbers(args: argparse.Namespace) -> None:
    least = {"min_layers": 0, "stages": 1, "virtual_stages": 1, "microbatches": 1, "world_size": 1}
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: at least {smallest} is needed")
    for name in ("memory_cap_gb", "device_tflops", "device_flops_per_byte"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: a finite number above 0 is needed")


def _write(path: Path, costs: ModelCosts) -> None:
    try:
        write_costs(path, costs)
    except OSError as error:
        raise ConfigError(f"cannot write costs to {path}: {error.strerror}") from error

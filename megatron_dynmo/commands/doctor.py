"""`dynmo doctor`: can layers of a run with these Megatron arguments be moved, or why not."""

import argparse
import importlib.metadata
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_dynmo import require_megatron
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dynmo.adapters.examination import Examination

_CANNOT_BE_MOVED = 1
_PACKAGES = ("megatron-dynmo", "megatron-core", "torch", "transformer-engine", "apex")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor` to the `dynmo` command.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "doctor",
        help="say whether layers of a run with these Megatron arguments can be moved",
        description="Read Megatron's own argument line and say for every feature under which "
        "layers cannot be moved whether it is in use, whether the split of the layers is legal, "
        "which versions are installed and whether the patches fit them. Trains nothing and needs "
        "no GPU. Exits with 0 if layers can be moved, with 1 if not.",
        epilog="Megatron's own arguments go behind --: dynmo doctor -- --num-layers 80 "
        "--pipeline-model-parallel-size 8 ...",
    )
    add = parser.add_argument
    add("--stages", metavar="P", type=int, help="pipeline size; default: that of the arguments")
    add("--all", action="store_true", help="list the refused features that are not in use, too")
    add("--json", action="store_true", help="print one JSON object")
    add("megatron_args", metavar="MEGATRON_ARGS", nargs="*", help="behind --")
    parser.set_defaults(run=run, unknown_hint="Megatron's arguments go behind --")


def run(args: argparse.Namespace) -> int:
    """Examine and print.

    Args:
        args: As parsed by the parser of `add_parser`.

    Returns:
        0 if layers can be moved, else 1.

    Raises:
        ConfigError: No arguments, wrong ones, or Megatron is not installed.
    """
    if not args.megatron_args:
        raise ConfigError("give Megatron's arguments behind --: dynmo doctor -- --num-layers 8 ...")
    if args.stages is not None and args.stages < 1:
        raise ConfigError(f"--stages {args.stages}: at least 1 is needed")
    require_megatron()
    with warnings.catch_warnings():
        # Megatron warns of every optional library that is absent; the answer names them.
        warnings.simplefilter("ignore")
        from megatron_dynmo.adapters import support
        from megatron_dynmo.adapters.examination import examine

        found = examine(args.megatron_args, args.stages)
        config = DynMoConfig.from_argv(args.megatron_args)
        problems = _patch_problems(config, found.gpus)
    can_move = not found.reasons and not problems
    console = Console(soft_wrap=args.json, markup=False, highlight=False)
    reasons = {feature.flag: feature.reason for feature in support.UNSUPPORTED}
    if args.json:
        document = _document(found, problems, reasons, config.dynamics)
        console.print_json(data={"can_move": can_move, **document}, indent=None)
    else:
        for reason in (*found.reasons, *map(_patch_line, problems)):
            console.print(f"cannot be moved: {reason}", style="red")
        if can_move:
            console.print("layers of this run can be moved", style="green")
        _show_features(console, found.refused, reasons, is_all=args.all)
        console.print(f"dynamics: {', '.join(config.dynamics) or 'none'}")
        _show_rest(console, found, problems)
    return 0 if can_move else _CANNOT_BE_MOVED


def _patch_problems(config: DynMoConfig, gpus: str | None) -> list[dict[str, Any]]:
    """Where Megatron differs from what the patches of balance mode expect."""
    from megatron_dynmo.patches import specs_for
    from megatron_dynmo.patching import PatchSet

    if config.mode != "balance":
        config = replace(config, mode="balance")
    on_cpu = config.device == "cpu" or gpus is None
    return [asdict(problem) for problem in PatchSet(specs_for(config, on_cpu=on_cpu)).check()]


def _versions() -> dict[str, str | None]:
    """Installed version of every package that matters, None where there is none."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _device(found: "Examination") -> str:
    return found.gpus or "no CUDA here: runs use the CPU over gloo"


def _document(
    found: "Examination",
    problems: list[dict[str, Any]],
    reasons: dict[str, str],
    dynamics: tuple[str, ...],
) -> dict[str, Any]:
    return {
        "reasons": [*found.reasons, *map(_patch_line, problems)],
        "features": [
            {"flag": flag, "in_use": in_use, "reason": reasons[flag]}
            for flag, in_use in found.refused.items()
        ],
        "dynamics": list(dynamics),
        "num_layers": found.num_layers,
        "stages": found.stages,
        "layout": None if found.layout is None else found.layout.to_megatron(),
        "patch_problems": problems,
        "versions": _versions(),
        "device": _device(found),
        "notes": list(found.notes),
    }


def _show_features(
    console: Console, refused: Mapping[str, bool], reasons: Mapping[str, str], *, is_all: bool
) -> None:
    """Those in use, or all."""
    table = Table(title="Features under which layers cannot be moved")
    table.add_column("feature", no_wrap=True)
    table.add_column("this run", no_wrap=True)
    table.add_column("why it is refused", overflow="fold")
    for flag, in_use in sorted(refused.items(), key=lambda item: not item[1]):
        state, style = ("refused", "bold red") if in_use else ("not in use", "dim")
        if in_use or is_all:
            table.add_row(flag, state, reasons[flag], style=style)
    if table.row_count:
        console.print(table)
    if (idle := len(refused) - sum(refused.values())) and not is_all:
        console.print(f"not in use: {idle} features under which they cannot (--all names them)")


def _show_rest(console: Console, found: "Examination", problems: list[dict[str, Any]]) -> None:
    """Versions, patches, the layout, and what is of note."""
    installed = (f"{name} {version or 'not installed'}" for name, version in _versions().items())
    console.print(f"versions: {', '.join(installed)}")
    console.print(f"device: {_device(found)}")
    console.print(f"patches: {len(problems)} problems" if problems else "patches: fit")
    if found.layout is not None:
        console.print(f"layout at the start: {found.layout} (legal)")
    for note in found.notes:
        console.print(f"note: {note}")


def _patch_line(problem: dict[str, Any]) -> str:
    return (
        f"patch {problem['patch']} of {problem['target']}: {problem['kind']}, expected "
        f"{problem['expected']}, found {problem['found']}"
    )

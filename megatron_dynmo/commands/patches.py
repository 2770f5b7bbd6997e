"""`dynmo patches`: what is patched in Megatron and why, whether it still fits, new digests.

Changes nothing: `check` and `digest` import the patched modules and look at them.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dynmo.errors import PatchError
from megatron_dynmo.patching import PatchSet, PatchSpec, active
from megatron_dynmo.patching.guards import target_digest


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `patches` to the `dynmo` command.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "patches",
        help="list or check what is patched in Megatron, and why",
        description="Show the patches (list), compare them with the installed Megatron and torch "
        "(check: exits with 1 if anything differs), or print the digests to write into the "
        "patches after reading a new Megatron (digest). Nothing is changed.",
    )
    parser.add_argument("action", choices=("list", "check", "digest"))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--markdown", action="store_true", help="list: print docs/patches.md, with every reason"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `dynmo patches`.

    Args:
        args: `action` ("list", "check" or "digest"), `json` and `markdown`.

    Returns:
        1 if `check` found a problem or `digest` a missing target, else 0.
    """
    from megatron_dynmo.patches import all_specs  # imports Megatron, so only when it is needed

    if args.markdown:
        print(document(all_specs()), end="")
        return 0
    actions = {"list": _list, "check": _check, "digest": _digest}
    return actions[args.action](all_specs(), args.json, Console())


def document(specs: Iterable[PatchSpec]) -> str:
    """Return docs/patches.md."""
    return (
        "# What is patched in Megatron, and why\n\n"
        "Made by `dynmo patches list --markdown`; a test compares it with the specs.\n\n"
        "- Mode `observe` applies `parse-args`, `setup-model-and-optimizer`, `train-step`, "
        "`forward-step` and `backward-step`, and those of checkpoints, `distopt-...`.\n"
        "- Mode `balance` also applies those of buckets and numerics.\n"
        "- The rest is applied only where CUDA is absent, where a wheel or an optional library is "
        "missing, or on emulated devices.\n\n"
        "All or none are applied; `dynmo patches check` compares them with the installed "
        "Megatron.\n\n" + markdown_table(specs)
    )


def markdown_table(specs: Iterable[PatchSpec]) -> str:
    """Return the patches as a Markdown table."""
    header = ("Patch", "Kind", "Target", "Why", "Seam tried", "Goes when")
    rows: list[tuple[str, ...]] = [header, tuple("---" for _ in header)]
    for spec in specs:
        places = "<br>".join(f"`{place}`" for place in (spec.target, *spec.bindings))
        texts = (spec.reason, spec.seam_tried, spec.remove_when)
        rows.append((f"`{spec.name}`", spec.kind.value, places, *map(_cell, texts)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _list(specs: Sequence[PatchSpec], as_json: bool, console: Console) -> int:
    records = [asdict(record) for record in (active() or PatchSet(specs)).status()]
    columns = ("name", "kind", "target", "bindings", "state", "reason")
    _show(records, columns, f"{len(records)} patches", as_json, console)
    return 0


def _check(specs: Sequence[PatchSpec], as_json: bool, console: Console) -> int:
    problems = [asdict(problem) for problem in PatchSet(specs).check()]
    columns = ("patch", "target", "kind", "expected", "found", "fix")
    if problems or as_json:
        _show(problems, columns, f"{len(problems)} problems", as_json, console)
    else:
        fits = ", ".join(sorted({spec.requires for spec in specs}))
        console.print(f"{len(specs)} patches fit what is installed ({fits})", highlight=False)
    return 1 if problems else 0


def _digest(specs: Sequence[PatchSpec], as_json: bool, console: Console) -> int:
    found: dict[str, dict[str, str]] = {}
    missing: list[str] = []
    for spec in specs:
        try:
            digest = target_digest(spec)
        except PatchError as error:
            missing.append(str(error))
        else:
            if digest is not None:
                found[spec.name] = dict([digest])
    if as_json:
        console.print_json(data={"digests": found, "missing": missing})
    else:
        for name, digests in found.items():
            for version, digest_text in digests.items():
                _print_line(console, f'{name}: "{version}": "{digest_text}",')
        for text in missing:
            _print_line(console, text)
    return 1 if missing else 0


def _print_line(console: Console, text: str) -> None:
    """Print text as it is: no markup, no line breaks, so that it can be pasted."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _show(
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    title: str,
    as_json: bool,
    console: Console,
) -> None:
    if as_json:
        console.print_json(data=list(rows))
        return
    table = Table(title=title, show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = (row[column] for column in columns)
        table.add_row(*("\n".join(c) if isinstance(c, tuple) else str(c) for c in cells))
    console.print(table, markup=False)

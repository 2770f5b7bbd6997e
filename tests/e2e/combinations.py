"""Which dynamics go together: refused with a reason, or run through the conformance suite."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections.abc import Iterable, Mapping
from unittest import mock

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.cpu.arguments import cpu_argument_defaults
from megatron_dynmo.dynamics.dynamics import require_supported
from megatron_dynmo.errors import ConfigError
from scripts.results import ROOT
from tests.e2e.conformance import EARLY_EXIT, FREEZING, PRUNING, ROUTED, SPARSE_ATTENTION, Case
from tests.e2e.matrix import MOE
from tests.e2e.training import TINY_GPT

DOCUMENT = ROOT / "docs" / "dynamics" / "combinations.md"
EQUAL = "equal"
# One case of each kind; neurons stand for all pruning, the schedule for all freezing.
OF_KIND = {
    "freezing": FREEZING[0],
    "pruning": PRUNING[2],
    "early exit": EARLY_EXIT[0],
    "Mixture of Depths": ROUTED[0],
    "MoE": ROUTED[1],
    "sparse attention": SPARSE_ATTENTION[0],
}
SETS = [
    names for size in range(2, len(OF_KIND) + 1) for names in itertools.combinations(OF_KIND, size)
]
_HEAD = """# Dynamics together

Written by `make test-slow`; not to be edited. Every set of kinds is either refused before
training starts, with the reason, or trained twice on a tiny GPT over two stages, once with moves in
the midst of the dynamics: "equal" means the same bits of losses, gradient norms, parameters and
moments in every iteration. A set of three or more that holds a refused pair is refused for that
pair's reason and not listed.

| Kinds | Outcome |
| --- | --- |
"""


def case_of(names: Iterable[str]) -> Case:
    """All dynamics of a set in one run."""
    cases = [OF_KIND[name] for name in names]
    return Case(
        name=" + ".join(names),
        flags=tuple(word for case in cases for word in case.flags),
        needs_moe=any(case.needs_moe for case in cases),
    )


def refusal(case: Case) -> str | None:
    """Why a set cannot run, as the user is told; None when it can."""
    from megatron.training.arguments import parse_args

    words = [*TINY_GPT, *(MOE if case.needs_moe else ()), *case.flags]
    words += cpu_argument_defaults(words)
    with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]):
        with contextlib.redirect_stdout(io.StringIO()):
            args = parse_args(DynMoConfig.add_arguments)
    try:
        require_supported(DynMoConfig.from_namespace(args), args)
    except ConfigError as error:
        return str(error)
    return None


def refusals() -> dict[tuple[str, ...], str]:
    """The sets that are refused, without those that only hold a smaller one that is."""
    found: dict[tuple[str, ...], str] = {}
    for names in SETS:
        if any(set(smaller) < set(names) for smaller in found):
            continue
        reason = refusal(case_of(names))
        if reason is not None:
            found[names] = reason
    return found


def runnable() -> list[tuple[str, ...]]:
    """The sets that can run."""
    refused = refusals()
    return [names for names in SETS if not any(set(r) <= set(names) for r in refused)]


def document(equal: Iterable[tuple[str, ...]], refused: Mapping[tuple[str, ...], str]) -> str:
    """The table as Markdown."""
    outcomes = dict.fromkeys(equal, EQUAL) | {n: f"refused: {r}" for n, r in refused.items()}
    lines = (
        f"| {' + '.join(names)} | {outcomes[names]} |\n" for names in SETS if names in outcomes
    )
    return _HEAD + "".join(lines)

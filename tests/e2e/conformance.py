"""What every dynamic must keep: the cases of all kinds, and the settings they are run in."""

from __future__ import annotations

from dataclasses import dataclass

from tests.e2e.matrix import FULL, LLAMA, MOE, OVERLAP, TP
from tests.e2e.parity import Cell

ITERATIONS = 12


@dataclass(frozen=True)
class Case:
    """One way to use a dynamic on the tiny GPT of 4 layers, changing between iterations 2 and 9.

    Attributes:
        name: what the table calls it.
        flags: of the dynamic, and of Megatron where the model needs some.
        needs_moe: whether the layers are MoE layers.
        in_ci: whether CI runs it in those settings that it runs.
    """

    name: str
    flags: tuple[str, ...]
    needs_moe: bool = False
    in_ci: bool = True


UNTIED = "--untie-embeddings-and-output-weights"
FREEZING = (
    Case(
        "freezing by schedule, with a thaw",
        (UNTIED, "--dynmo-freeze", "schedule", "--dynmo-freeze-schedule", "2:1;4:3;7:1;9:2"),
    ),
    Case(
        "autofreeze, tied embedding",
        (
            *("--dynmo-freeze", "autofreeze", "--dynmo-freeze-interval", "2"),
            *("--dynmo-freeze-percentile", "1"),
        ),
        in_ci=False,
    ),
    Case(
        "egeria",
        (
            *(UNTIED, "--dynmo-freeze", "egeria", "--dynmo-freeze-interval", "1"),
            *("--dynmo-freeze-window", "2", "--dynmo-freeze-tolerance", "1"),
            *("--dynmo-freeze-thaw-ratio", "0.5"),
        ),
        in_ci=False,
    ),
    Case(
        "freezing by schedule, MoE",
        (UNTIED, "--dynmo-freeze", "schedule", "--dynmo-freeze-schedule", "2:2;6:1;8:4"),
        needs_moe=True,
        in_ci=False,
    ),
)
HASH = ("--dynmo-sparse-attention", "hash")
SPARSE_ATTENTION = (
    Case(
        "sparse attention by schedule",
        (*HASH, "--dynmo-sparse-attention-buckets", "0:1;2:2;4:4@1-2;6:3@3,4;7:8"),
    ),
    Case(
        "sparse attention by content, two rounds, grouped queries",
        (
            *(*HASH, "--dynmo-sparse-attention-buckets", "2"),
            *("--dynmo-sparse-attention-rounds", "2", "--dynmo-sparse-attention-codes", "shared"),
            *("--dynmo-sparse-attention-density", "0.9", *LLAMA, "--seq-length", "160"),
            *("--max-position-embeddings", "160"),
        ),
        in_ci=False,
    ),
)
ROUTED = (
    Case(
        "Mixture of Depths",
        (
            *("--dynmo-mod", "--dynmo-mod-routing", "threshold", "--micro-batch-size", "2"),
            *("--dynmo-mod-capacity", "1:1.0;3:0.5;6:0.125", *LLAMA),
        ),
    ),
    Case(
        "MoE",
        (
            # Sinkhorn, so that decisions rest on the skewed logits of all tokens.
            *("--dynmo-moe-skew", "phases:period=6", "--moe-layer-freq", "2"),
            *("--moe-router-load-balancing-type", "sinkhorn"),
        ),
        needs_moe=True,
    ),
)


def _pruning(name: str, kind: str, final: str, *flags: str, in_ci: bool = False) -> Case:
    steps = ("--dynmo-prune-begin", "2", "--dynmo-prune-end", "9", "--dynmo-prune-every", "3")
    words = ("--dynmo-prune", kind, "--dynmo-prune-final", final, *steps, *flags)
    return Case(f"pruning of {name}", words, in_ci=in_ci)


GROUPS = ("--num-attention-heads", "8", "--num-query-groups", "4")
COMPUTE = "--dynmo-prune-compute"  # what a machine measures must not decide a test
PRUNING = (
    _pruning("single weights", "magnitude", "0.8", COMPUTE, "dense"),
    _pruning("single weights, gated", "magnitude", "0.8", COMPUTE, "dense", *LLAMA),
    _pruning("two of four", "magnitude", "0.5", COMPUTE, "dense", "--dynmo-prune-pattern", "2:4"),
    _pruning("neurons", "neuron", "0.75", in_ci=True),
    _pruning("gated neurons", "neuron", "0.75", "--dynmo-prune-multiple", "2", *LLAMA),
    _pruning("heads", "head", "0.5"),
    _pruning("query groups", "head", "0.4", *LLAMA, *GROUPS),
)
EARLY_EXIT = (
    Case(
        "early exit by confidence",
        (
            *("--dynmo-early-exit", "confidence", "--dynmo-early-exit-min-layer", "1"),
            *("--dynmo-early-exit-classes", "32"),
            *("--dynmo-early-exit-threshold", "2:0.0322"),
        ),
    ),
    Case(
        "early exit by saturation",
        (
            *("--dynmo-early-exit", "saturation", "--dynmo-early-exit-min-layer", "1"),
            *("--dynmo-early-exit-threshold", "2:1.001;9:0.97"),
        ),
        in_ci=False,
    ),
)
CASES: tuple[Case, ...] = (*FREEZING, *PRUNING, *SPARSE_ATTENTION, *ROUTED, *EARLY_EXIT)


@dataclass(frozen=True)
class Setting:
    """Where a case is run.

    Attributes:
        name: what the table calls it.
        ranks: processes.
        flags: Megatron's flags.
        moves: text of --dynmo-force-layout, in the midst of the dynamic.
        in_ci: whether CI runs it; the rest are matrix cells.
    """

    name: str
    ranks: int
    flags: tuple[str, ...]
    moves: str
    in_ci: bool = False


MOVES = "3:E|ttttL;5:Ettt|tL;8:Et|tttL"
VIRTUAL = ("--num-layers", "8", "--num-virtual-stages-per-pipeline-rank", "2")
SETTINGS = (
    Setting("fp32, PP 2", 2, (), MOVES, in_ci=True),
    Setting("bf16 distributed optimizer, overlap, PP 2 x DP 2", 4, ("--bf16", *OVERLAP), MOVES),
    Setting("fp32, PP 2 x TP 2 with sequence parallel", 4, TP, MOVES),
    Setting("fp32, PP 2 x 2 virtual stages", 2, VIRTUAL, "3:Ettt|t|tt|ttL;6:Et|ttt|t|tttL"),
    Setting("fp32, PP 2, full recompute", 2, (*FULL, "uniform"), MOVES),
)


def cell_of(case: Case, setting: Setting) -> Cell:
    """The pair of runs, unmoved and moved, of one case in one setting."""
    return Cell(
        name=f"{case.name}; {setting.name}",
        ranks=setting.ranks,
        flags=(
            *("--pipeline-model-parallel-size", "2"),
            *((*MOE, "--moe-layer-freq", "2") if case.needs_moe else ()),
            *setting.flags,
            *case.flags,
        ),
        moves=setting.moves,
        iterations=ITERATIONS,
    )

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
    """

    name: str
    flags: tuple[str, ...]
    needs_moe: bool = False


CASES: tuple[Case, ...] = (
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
            *(MOE if case.needs_moe else ()),
            *setting.flags,
            *case.flags,
        ),
        moves=setting.moves,
        iterations=ITERATIONS,
    )

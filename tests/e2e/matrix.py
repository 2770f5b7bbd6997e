"""The configurations in which random moves must change nothing, and the moves."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass

from megatron_dynmo.layout import LayerLayout
from tests.e2e.parity import Cell

ITERATIONS = 14
MOVES = 11


@dataclass(frozen=True)
class Configuration:
    """One row of the matrix.

    Attributes:
        name: what the table calls it.
        ranks: processes; those beyond the pipeline are data, tensor, context or expert parallel.
        stages: pipeline-parallel size.
        flags: Megatron's flags beside those of the tiny model.
        layers: decoder layers.
        virtual: chunks a rank.
        mtp: multi-token-prediction layers.
    """

    name: str
    ranks: int
    stages: int
    flags: tuple[str, ...] = ()
    layers: int = 4
    virtual: int = 1
    mtp: int = 0


DIST_OPT = ("--use-distributed-optimizer",)
OVERLAP = (*DIST_OPT, "--overlap-grad-reduce", "--overlap-param-gather")
UNTIED = ("--untie-embeddings-and-output-weights",)
TP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2", "--disable-bias-linear"),
)
MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq", "([0]*1+[1]*3)"),
    *("--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall"),
)
BIAS = (
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "1e-2"),
)
MLA = (
    *("--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "16"),
    *("--qk-head-dim", "8", "--qk-pos-emb-head-dim", "4", "--v-head-dim", "8"),
    *("--rotary-scaling-factor", "1.0", "--rotary-base", "10000"),
    *("--mscale", "1.0", "--mscale-all-dim", "1.0"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm"),
)
FULL = ("--recompute-granularity", "full", "--recompute-num-layers", "1", "--recompute-method")
MUON = ("--optimizer", "muon", "--muon-momentum", "0.9")
SGD = ("--optimizer", "sgd", "--sgd-momentum", "0.9")


def _block(attends: bool, width: int | None) -> dict[str, object]:
    return {
        "attention": {"n_heads_in_group": 2 if attends else None, "no_op": not attends},
        "mlp": {"ffn_hidden_size": width, "no_op": width is None},
    }


HETEROGENEOUS = (
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--group-query-attention", "--num-query-groups", "2"),
    *("--position-embedding-type", "rope", "--use-rope-scaling", "--rope-scaling-factor", "8.0"),
    *("--use-rotary-position-embeddings", "--rotary-base", "10000"),
    "--heterogeneous-layers-config-encoded-json",
    json.dumps(
        {
            **{"hidden_act": "silu", "num_hidden_layers": 4, "hidden_size": 32},
            **{"num_attention_heads": 4, "tie_word_embeddings": True, "rope_theta": 10000},
            "rope_scaling": {"factor": 8.0},
            "block_configs": [
                *(_block(True, 64), _block(True, 96), _block(False, 32), _block(True, None)),
            ],
        }
    ),
)

CELLS = (
    Configuration("fp32, PP 3, 6 layers, tied", 3, 3, layers=6),
    Configuration("bf16, PP 4, 8 layers, untied", 4, 4, ("--bf16", *UNTIED), layers=8),
    Configuration("fp16 with loss scaling, PP 2", 2, 2, ("--fp16", "--loss-scale-window", "2")),
    Configuration("fp32 distributed optimizer, PP 2 x DP 2, tied", 4, 2, DIST_OPT),
    Configuration("bf16 distributed optimizer, overlap, PP 2 x DP 2", 4, 2, ("--bf16", *OVERLAP)),
    Configuration(
        "bf16 distributed optimizer, overlap of gradient reduce only, PP 2 x DP 2, untied",
        *(4, 2, ("--bf16", *DIST_OPT, "--overlap-grad-reduce", *UNTIED)),
    ),
    Configuration("fp32, PP 2 x TP 2 with sequence parallel", 4, 2, TP),
    Configuration(
        "bf16 distributed optimizer, overlap, PP 2 x TP 2 with sequence parallel, GQA",
        *(4, 2, ("--bf16", *OVERLAP, *TP, *LLAMA)),
    ),
    Configuration(
        "bf16 distributed optimizer, PP 2 x CP 2",
        *(4, 2, ("--bf16", *DIST_OPT, "--context-parallel-size", "2")),
    ),
    Configuration(
        "bf16 distributed optimizer, overlap, PP 2 x EP 2, dense-first MoE with expert bias",
        *(4, 2, ("--bf16", *OVERLAP, *MOE, *BIAS, "--expert-model-parallel-size", "2")),
    ),
    Configuration(
        "fp32, PP 2 x DP 2, MoE with experts shared and global aux loss",
        4,
        2,
        (
            *MOE,
            *(
                "--moe-router-load-balancing-type",
                "global_aux_loss",
                "--moe-aux-loss-coeff",
                "1e-2",
            ),
            *("--moe-shared-expert-intermediate-size", "32"),
        ),
    ),
    Configuration(
        "fp32, PP 2, MoE with expert bias, a dense layer between",
        *(2, 2, (*MOE, *BIAS, "--moe-layer-freq", "[1,0,1,1]")),
    ),
    Configuration(
        "fp32, PP 2, MoE with quantile balancing",
        2,
        2,
        (
            *MOE,
            *("--moe-router-score-function", "sigmoid"),
            *("--moe-router-load-balancing-type", "quantile_balancing"),
        ),
    ),
    Configuration("fp32, PP 2 x 2 virtual stages", 2, 2, layers=8, virtual=2),
    Configuration(
        "bf16 distributed optimizer, overlap, PP 2 x DP 2, 2 virtual stages",
        *(4, 2, ("--bf16", *OVERLAP), 8, 2),
    ),
    Configuration("bf16, PP 2, GQA, RMSNorm, SwiGLU, RoPE", 2, 2, ("--bf16", *LLAMA)),
    Configuration("fp32, PP 2, MLA", 2, 2, MLA),
    Configuration("fp32, PP 2, MTP", 2, 2, (*LLAMA, "--mtp-num-layers", "1"), mtp=1),
    Configuration(
        "bf16, PP 2, MLA, MoE with expert bias, MTP",
        *(2, 2, ("--bf16", *MLA, *MOE, *BIAS, "--mtp-num-layers", "1"), 4, 1, 1),
    ),
    Configuration("fp32, PP 3, full recompute, uniform", 3, 3, (*FULL, "uniform"), layers=6),
    Configuration("bf16, PP 2, full recompute, block", 2, 2, ("--bf16", *FULL, "block")),
    Configuration(
        "bf16, PP 2, selective recompute",
        *(2, 2, ("--bf16", "--recompute-granularity", "selective")),
    ),
    Configuration("bf16, PP 2, SGD with momentum", 2, 2, ("--bf16", *SGD)),
    Configuration(
        "fp32, PP 2 x DP 2, SGD with momentum, overlap of gradient reduce",
        *(4, 2, (*SGD, "--overlap-grad-reduce")),
    ),
    Configuration("fp32, PP 2 x DP 2, Muon", 4, 2, MUON),
    Configuration("bf16, PP 2 x TP 2, Muon", 4, 2, ("--bf16", *MUON, *TP, *UNTIED)),
    Configuration("fp32, PP 2, layers of different kinds", 2, 2, HETEROGENEOUS),
    Configuration(
        "fp32, PP 2, dropout with --dynmo-layer-rng",
        *(2, 2, ("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--dynmo-layer-rng")),
    ),
)

# The same moves once more, with the optimizer's state following while the next iteration computes.
FOLLOWED = (
    "fp32, PP 3, 6 layers, tied",
    "fp16 with loss scaling, PP 2",
    "bf16 distributed optimizer, overlap, PP 2 x DP 2",
    "bf16 distributed optimizer, overlap, PP 2 x EP 2, dense-first MoE with expert bias",
    "bf16 distributed optimizer, overlap, PP 2 x DP 2, 2 virtual stages",
    "fp32, PP 2 x DP 2, Muon",
)
CELLS = (
    *CELLS,
    *(
        dataclasses.replace(
            cell,
            name=f"{cell.name}, state follows",
            flags=(*cell.flags, "--dynmo-overlap-moves"),
        )
        for cell in CELLS
        if cell.name in FOLLOWED
    ),
)


def random_cell(configuration: Configuration, seed: int) -> Cell:
    """Draw moves for a configuration, the same for the same seed.

    Every split of the layers is as likely as any other, those with stages without layers among
    them, except the one in force, and those that would move the layer which MTP hangs on.
    """
    draw = random.Random(seed)
    start = LayerLayout.even(
        configuration.layers,
        configuration.stages,
        virtual_stages=configuration.virtual,
        mtp_num_layers=configuration.mtp,
    )
    moves, layout = [], start
    for iteration in sorted(draw.sample(range(1, ITERATIONS), MOVES)):
        layout = _another(layout, draw)
        moves.append(f"{iteration}:{layout}")
    virtual = ("--num-virtual-stages-per-pipeline-rank", str(configuration.virtual))
    return Cell(
        name=configuration.name,
        ranks=configuration.ranks,
        flags=(
            *("--num-layers", str(configuration.layers)),
            *("--pipeline-model-parallel-size", str(configuration.stages)),
            *(virtual if configuration.virtual > 1 else ()),
            *configuration.flags,
        ),
        moves=";".join(moves),
        iterations=ITERATIONS,
    )


def _another(layout: LayerLayout, draw: random.Random) -> LayerLayout:
    # A split is a choice of chunks - 1 bars among layers and bars.
    places = layout.num_layers + layout.num_chunks - 1
    while True:
        bars = sorted(draw.sample(range(places), layout.num_chunks - 1))
        inner = [bar - index for index, bar in enumerate(bars)]
        drawn = layout.with_boundaries([0, *inner, layout.num_layers])
        last = layout.num_layers
        is_pinned = layout.mtp_num_layers > 0
        if drawn != layout and (not is_pinned or drawn.owner_of(last) == layout.owner_of(last)):
            return drawn

"""The kinds of dynamics as the benchmarks and the convergence check use them: data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

type Flags = Callable[[int], tuple[str, ...]]
"""Flags of a dynamic for a run of so many iterations."""


def words(text: str) -> tuple[str, ...]:
    """Words of a command line."""
    return tuple(text.split())


# Two pinned cores: half a second an iteration, balanced while nothing is dynamic.
REAL_MODEL = words(
    "--num-layers 8 --hidden-size 192 --ffn-hidden-size 768 --num-attention-heads 4 "
    "--seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 6 "
    "--pipeline-model-parallel-size 2 --lr 1e-3 --min-lr 1e-4"
)
REAL_ITERATIONS = 80

# Eight emulated ranks: as little real compute as leaves the dynamics something to decide on.
EMULATED_MODEL = words(
    "--num-layers 24 --hidden-size 16 --ffn-hidden-size 64 --num-attention-heads 2 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 12 "
    "--pipeline-model-parallel-size 8 --lr 2e-3 --min-lr 2e-4"
)
EMULATED_RANKS = 8
EMULATED_LAYERS = 24
EMULATED_ITERATIONS = 40
EMULATION: dict[str, Any] = {
    "num_layers": EMULATED_LAYERS,
    "every_layer": {"forward_ms": 2.0, "backward_ms": 4.0, "memory_bytes": 400_000_000},
    "first_stage_extra": {"forward_ms": 0.25, "backward_ms": 0.25},
    "last_stage_extra": {"forward_ms": 0.5, "backward_ms": 1.0},
    "optimizer_ms": 4.0,
    "link": {"latency_ms": 0.05, "bandwidth_gb_s": 25, "message_bytes": 16_777_216},
    "migration": {"bandwidth_gb_s": 25, "rebuild_ms": 150},
}

# One rank: small enough for a few hundred iterations, large enough to learn from text.
CONVERGENCE_MODEL = words(
    "--num-layers 6 --hidden-size 96 --ffn-hidden-size 384 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 8 --global-batch-size 8 "
    "--lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 10"
)
CONVERGENCE_ITERATIONS = 300


@dataclass(frozen=True)
class Kind:
    """One kind of dynamic.

    Attributes:
        name: in the tables.
        flags: of the dynamic, on the real and the emulated machine.
        paper_speedup: what DynMo's abstract gives, a maximum over sizes and baselines.
        real_model: flags of the model beside REAL_MODEL.
        emulated_model: flags of the model beside EMULATED_MODEL.
        emulated_flags: of the dynamic where they differ on the emulated machine.
        real_note: what to know of the real row.
        emulated_note: what to know of the emulated row.
    """

    name: str
    flags: Flags
    paper_speedup: float
    real_model: tuple[str, ...] = ()
    emulated_model: tuple[str, ...] = ()
    emulated_flags: Flags | None = None
    real_note: str = ""
    emulated_note: str = ""


def nothing(iterations: int) -> tuple[str, ...]:
    """No dynamic at all."""
    return ()


DENSE = Kind("dense", nothing, 1.0)
"""No dynamic: what the harness itself makes of a model that does not change."""


def at(iterations: int, share: float) -> int:
    """The iteration at a share of a run."""
    return max(round(iterations * share), 1)


def freezing(*layers: int, begin: float = 1 / 7, every: float = 1 / 7) -> Flags:
    """Up to these layers, one after the other, at these shares of the run."""

    def flags(iterations: int) -> tuple[str, ...]:
        steps = [
            f"{at(iterations, begin + number * every)}:{last}" for number, last in enumerate(layers)
        ]
        return ("--dynmo-freeze", "schedule", "--dynmo-freeze-schedule", ";".join(steps))

    return flags


def adaptive_freezing(how: str, every: float) -> Flags:
    """Evaluated at every such share of the run."""

    def flags(iterations: int) -> tuple[str, ...]:
        return words(f"--dynmo-freeze {how} --dynmo-freeze-interval {at(iterations, every)}")

    return flags


def skewed_experts(iterations: int) -> tuple[str, ...]:
    """A wave of skew whose crest moves from the middle of the model into its front half."""
    return ("--dynmo-moe-skew", f"phases:exponent=3,period={4 * iterations}")


def counted_experts(iterations: int) -> tuple[str, ...]:
    """The load that the router makes, counted."""
    return ("--dynmo-moe",)


def pruning(how: str, final: str, begin: float = 0.2, end: float = 0.6) -> Flags:
    """Cubic schedule between two shares of the run, in steps of a tenth."""

    def flags(iterations: int) -> tuple[str, ...]:
        return words(
            f"--dynmo-prune {how} --dynmo-prune-final {final} "
            f"--dynmo-prune-begin {at(iterations, begin)} --dynmo-prune-end {at(iterations, end)} "
            f"--dynmo-prune-every {at(iterations, 0.1)}"
        )

    return flags


def hashed_attention(layers: tuple[str, ...], buckets: tuple[int, ...]) -> Flags:
    """So many buckets for parts of the layers, one part after the other."""

    def flags(iterations: int) -> tuple[str, ...]:
        steps = ["0:1"]
        for number, (part, count) in enumerate(zip(layers, buckets, strict=True), 1):
            steps.append(f"{at(iterations, 0.15 * number)}:{count}@{part}")
        return (
            *("--dynmo-sparse-attention", "hash"),
            *("--dynmo-sparse-attention-buckets", ";".join(steps)),
        )

    return flags


def early_exit(how: str, first: float, last: float) -> Flags:
    """The threshold falls from first to last between a tenth and half of the run."""

    def flags(iterations: int) -> tuple[str, ...]:
        points = f"{at(iterations, 0.1)}:{first};{at(iterations, 0.5)}:{last}"
        return (
            *("--dynmo-early-exit", how, "--dynmo-early-exit-min-layer", "2"),
            *("--dynmo-early-exit-threshold", points),
        )

    return flags


def mixture_of_depths(iterations: int) -> tuple[str, ...]:
    """Every other layer, down to an eighth of the tokens in two steps."""
    half, eighth = at(iterations, 0.15), at(iterations, 0.3)
    return ("--dynmo-mod", "--dynmo-mod-capacity", f"1:1.0;{half}:0.5;{eighth}:0.125")


LONG = words(
    "--hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 1 --seq-length 1024 "
    "--max-position-embeddings 1024 --global-batch-size 6"
)
EXPERTS = words(
    "--moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2"
)
# Tied, the embedding would be trained by the output layer, and need its gradient from in front.
UNTIED = ("--untie-embeddings-and-output-weights",)
TRAINED_UNEVENLY = (
    "One threshold for the whole model: its first layers have learned larger weights, so they keep "
    "more of their neurons than deeper ones."
)
EVERY_OTHER = (
    "Every other layer is routed, so stages differ by one routed layer at most, and that is less "
    "than the full layer that would have to move: whole layers have next to nothing to gain."
)
KINDS: tuple[Kind, ...] = (
    Kind(
        "MoE",
        skewed_experts,
        1.23,
        real_model=(
            *EXPERTS,
            *("--moe-layer-freq", "([0]*3+[1]*5)"),
            *words("--num-experts 4 --hidden-size 128 --ffn-hidden-size 256 --global-batch-size 4"),
        ),
        # Two stages of four expert-parallel ranks each. Tokens of one expert each make the skew of
        # ranks as large as it gets.
        emulated_model=(
            *EXPERTS,
            *words(
                "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax "
                "--ffn-hidden-size 128 --seq-length 32 --max-position-embeddings 32 "
                "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 "
                "--global-batch-size 24"
            ),
        ),
        real_note="Each rank holds all experts of its layers, so skew does not change what a layer "
        "takes: uneven are the dense layers in front, from the start.",
        emulated_note="A layer costs what the busiest of its four expert-parallel ranks has to do.",
    ),
    Kind(
        "freezing",
        freezing(2, 4, 6),
        2.23,
        real_model=UNTIED,
        emulated_model=UNTIED,
        emulated_flags=freezing(8, 16, 21),
    ),
    # Half of the run is training before anything goes: untrained layers have like weights. The MLP
    # is two thirds of a layer, as in large models.
    Kind(
        "pruning",
        pruning("neuron", "0.9", begin=0.5, end=0.7),
        3.18,
        real_model=words(
            "--lr 2e-3 --lr-warmup-iters 10 --ffn-hidden-size 1024 --seq-length 128 "
            "--max-position-embeddings 128 --global-batch-size 8"
        ),
        emulated_model=words(
            "--hidden-size 64 --ffn-hidden-size 512 --num-attention-heads 8 --seq-length 128 "
            "--max-position-embeddings 128 --lr-warmup-iters 10 --pipeline-model-parallel-size 4 "
            "--global-batch-size 16"
        ),
        real_note=TRAINED_UNEVENLY,
        emulated_note=f"{TRAINED_UNEVENLY} Four stages of six layers and two replicas; eight "
        "stages of three allowed as little, 1.04 settled.",
    ),
    Kind(
        "sparse attention",
        hashed_attention(("7-8", "5-6", "3-4"), (16, 16, 16)),
        4.02,
        real_model=LONG,
        emulated_model=words(
            "--seq-length 1024 --max-position-embeddings 1024 --num-attention-heads 1 "
            "--global-batch-size 8"
        ),
        emulated_flags=hashed_attention(("19-24", "13-18", "7-12"), (16, 16, 16)),
    ),
    # With these, tokens leave in the middle of 8 layers, and in the first third of 24.
    Kind(
        "early exit",
        early_exit("saturation", 1.0, 0.97),
        4.52,
        emulated_flags=early_exit("saturation", 1.0, 0.99),
    ),
    Kind(
        "Mixture of Depths",
        mixture_of_depths,
        1.17,
        emulated_model=words("--global-batch-size 8"),
        real_note=EVERY_OTHER,
        emulated_note=EVERY_OTHER,
    ),
)


@dataclass(frozen=True)
class Trial:
    """One kind in the convergence check.

    Attributes:
        name: in the table.
        flags: of the dynamic.
        distance: by how much its final loss may exceed the dense model's.
        base: flags of the dense model that it is compared with, beside CONVERGENCE_MODEL.
        model: flags of its own model beside those.
        equal_flops: whether it is also compared at equal training FLOPs.
        note: what to know of the row.
    """

    name: str
    flags: Flags
    distance: float
    base: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    equal_flops: bool = False
    note: str = ""


DENSE_TRIAL = Trial("dense", nothing, 0.0)
DENSE_UNTIED_TRIAL = Trial("dense, untied", nothing, 0.0, base=UNTIED)

TRIALS: tuple[Trial, ...] = (
    # As the router wills: a skew from outside would only tell experts apart by chance.
    Trial("MoE", counted_experts, 0.1, model=(*EXPERTS, "--num-experts", "4")),
    Trial(
        "freezing, schedule",
        freezing(2, 3, 4, begin=0.4, every=0.15),
        0.25,
        base=UNTIED,
        note="Four of six layers and the embedding stand still over the last three tenths.",
    ),
    Trial("freezing, AutoFreeze", adaptive_freezing("autofreeze", 1 / 6), 0.25, base=UNTIED),
    Trial("freezing, Egeria", adaptive_freezing("egeria", 1 / 12), 0.25, base=UNTIED),
    Trial(
        "pruning, magnitude",
        pruning("magnitude", "0.8"),
        0.1,
        note="The calibration keeps dense products at this size, so no FLOPs are saved.",
    ),
    Trial("pruning, neurons", pruning("neuron", "0.75"), 0.1),
    Trial("pruning, heads", pruning("head", "0.5"), 0.1),
    Trial(
        "sparse attention",
        hashed_attention(("5-6", "3-4"), (4, 2)),
        0.1,
        note="A sequence is one block of 128, so tokens are kept apart, but no FLOPs are saved.",
    ),
    Trial("early exit", early_exit("saturation", 1.0, 0.95), 0.1, equal_flops=True),
    Trial(
        "Mixture of Depths",
        mixture_of_depths,
        0.1,
        equal_flops=True,
        note="Below the dense model, since a shallow one learns faster at first: controls are in "
        "[Mixture of Depths](mixture-of-depths.md).",
    ),
)

"""Which of Megatron's flags a run without CUDA needs, and which it cannot have.

Pure: imports neither torch nor Megatron. Megatron's own defaults suit a GPU with
TransformerEngine; what is added here only chooses the plain implementation of the same model.
"""

import itertools
import logging
from collections.abc import Sequence

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.launch import is_rank_0

logger = logging.getLogger(__name__)

# Flag -> the only value that works. Megatron's default is another one.
_NEEDED_VALUES = {"--distributed-backend": "gloo", "--transformer-impl": "local"}

# Flags without a value that choose plain torch; none has a counterpart that asks for the fusion.
_NEEDED_SWITCHES = (
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
)

# Switch -> what it needs.
_IMPOSSIBLE_SWITCHES = {
    "--enable-cuda-graph": "a CUDA device",
    "--external-cuda-graph": "a CUDA device",
    "--optimizer-cuda-graph": "a CUDA device",
    "--fp8-param-gather": "TransformerEngine on a GPU",
    "--fp4-param-gather": "TransformerEngine on a GPU",
    "--te-rng-tracker": "TransformerEngine on a GPU",
    "--tp-comm-overlap": "TransformerEngine on a GPU",
    "--use-precision-aware-optimizer": "TransformerEngine on a GPU",
    "--moe-router-fusion": "TransformerEngine on a GPU",
    "--moe-permute-fusion": "TransformerEngine on a GPU",
    "--moe-grouped-gemm": "a grouped GEMM kernel on a GPU",
    "--use-flash-attn": "the flash-attn kernels on a GPU",
    "--fine-grained-activation-offloading": "a GPU to offload from",
    "--optimizer-cpu-offload": "a GPU to offload from",
    "--use-megatron-fsdp": "NCCL",
    "--use-torch-fsdp2": "NCCL",
    "--use-nccl-ub": "NCCL",
    "--use-sharp": "NCCL",
}

# Flag -> values that need something a CPU has not; None stands for any value.
_IMPOSSIBLE_VALUES: dict[str, frozenset[str] | None] = {
    "--fp8-format": None,
    "--fp4-format": None,
    "--nccl-communicator-config-path": None,
    "--pipeline-model-parallel-comm-backend": None,
    "--cuda-graph-impl": frozenset({"local", "transformer_engine", "full_iteration"}),
    "--attention-backend": frozenset({"flash", "fused"}),
    "--moe-token-dispatcher-type": frozenset({"flex"}),
    "--cross-entropy-fusion-impl": frozenset({"te"}),
}


def cpu_argument_defaults(argv: Sequence[str]) -> list[str]:
    """Return the flags to append to a Megatron command line so that it runs on a CPU.

    What the user gave already is not repeated. Rank 0 logs one line that says what was added. The
    environment variable CUDA_DEVICE_MAX_CONNECTIONS is never needed (`cuda_api.CpuProperties`).

    Args:
        argv: The words after the program's name, `--flag value` or `--flag=value`.

    Returns:
        Words to append, possibly none.

    Raises:
        ConfigError: The user asked for something that needs CUDA, or that Megatron's local layers
            cannot train; the text names the flag and what to write instead.
    """
    given = _read(argv)
    _refuse_impossible(given)
    added = []
    for flag, value in _NEEDED_VALUES.items():
        if flag not in given:
            added += [flag, value]
    added += [switch for switch in _NEEDED_SWITCHES if switch not in given]
    if is_rank_0():
        logger.info(
            "no CUDA: training on the CPU over gloo, CUDA_DEVICE_MAX_CONNECTIONS not needed; "
            "flags added: %s",
            " ".join(added) or "none",
        )
    return added


def _read(argv: Sequence[str]) -> dict[str, str]:
    """Return each flag with the word that follows it; of a repeated flag the last one counts."""
    given = {}
    for word, following in itertools.pairwise([*argv, ""]):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            given[flag] = value if equals else following
    return given


def _refuse_impossible(given: dict[str, str]) -> None:
    for flag, value in _NEEDED_VALUES.items():
        if given.get(flag, value) != value:
            raise ConfigError(
                f"{flag} {given[flag]} needs CUDA, which this run has not: "
                f"write {flag} {value}, or leave the flag out"
            )
    for switch, need in _IMPOSSIBLE_SWITCHES.items():
        if switch in given:
            raise ConfigError(f"{switch} needs {need}, which this run has not: leave it out")
    for flag, values in _IMPOSSIBLE_VALUES.items():
        if flag in given and (values is None or given[flag] in values):
            raise ConfigError(
                f"{flag} {given[flag]} needs CUDA, which this run has not: leave the flag out"
            )
    if "--num-experts" in given and "--disable-bias-linear" not in given:
        # Upstream adds an expert's bias in place to a view that autograd guards, on any device; a
        # GPU escapes it only through TransformerEngine's experts.
        raise ConfigError(
            "--num-experts with --transformer-impl local trains only experts without bias: "
            "add --disable-bias-linear"
        )

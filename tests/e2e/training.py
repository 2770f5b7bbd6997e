"""Train a tiny GPT with real Megatron in one rank, and give its numbers as exact text.

To be called through `tests.ranks.run_ranks`. Numbers come as `float.hex` and tensors as sha256 of
their bytes, never rounded.
"""

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

TINY_GPT = """
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4
    --train-iters 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 8
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 98,1,1
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0
    --attention-dropout 0 --hidden-dropout 0
""".split()


def train(rank: int, world_size: int, *argv: Sequence[str]) -> dict[str, Any]:
    """Train on a CPU with stock Megatron and the CPU layer alone.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        argv: Words of the command line, after those of `TINY_GPT`; a later flag wins.

    Returns:
        `losses` and `grad_norms` of each iteration on this rank (losses only on the last stage),
        `parameters` and `moments`, sha256 by name, at the end.

    Collective:
        Every rank, with the same words.
    """
    from megatron_dynmo.cpu import cpu_specs
    from megatron_dynmo.cpu.arguments import cpu_argument_defaults
    from megatron_dynmo.patches import checkpoint_fixes
    from megatron_dynmo.patching import patched

    words = [*TINY_GPT, *argv]
    sys.argv = ["pretrain_gpt.py", *words, *cpu_argument_defaults(words)]
    with patched((*cpu_specs(), *checkpoint_fixes.specs())):
        seen = record_steps()
        _pretrain()
        return {
            "losses": [
                {name: exact(value) for name, value in step[0].items()} for step in seen["steps"]
            ],
            "grad_norms": [exact(step[5]) for step in seen["steps"]],
            **digests(seen["model"], seen["optimizer"]),
        }


def record_steps() -> dict[str, Any]:
    """Make Megatron's `train_step` leave its results, the model and the optimizer in a dict."""
    import megatron.training.training as training

    seen: dict[str, Any] = {"steps": []}
    train_step = training.train_step

    def recording(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        seen["model"], seen["optimizer"] = args[2], args[3]
        seen["steps"].append(result)
        return result

    training.train_step = recording
    return seen


def _pretrain() -> None:
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.training import pretrain

    from megatron_dynmo.adapters import gpt_data, gpt_stages, gpt_step

    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        gpt_data.train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        gpt_step.forward_step,
        get_embedding_ranks=gpt_stages.get_embedding_ranks,
    )


def exact(value: Any) -> str:
    """Write a number, or a one-element tensor, so that no bit is lost."""
    return float(value).hex()


def digests(model: list[Any], optimizer: Any) -> dict[str, dict[str, str]]:
    """Digest the parameters and the optimizer's whole state on this rank."""
    parameters = {
        f"{index}.{name}": _digest(parameter)
        for index, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
    }
    moments = {}
    for member, chained in enumerate(optimizer.chained_optimizers):
        groups = chained.optimizer.param_groups
        for number, main in enumerate(main for group in groups for main in group["params"]):
            moments[f"{member}.{number}.main"] = _digest(main)
            for key, value in chained.optimizer.state[main].items():
                moments[f"{member}.{number}.{key}"] = _digest(value)
    return {"parameters": parameters, "moments": moments}


def _digest(tensor: Any) -> str:
    import torch

    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()

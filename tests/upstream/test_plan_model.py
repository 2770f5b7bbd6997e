"""The planner's idea of Megatron against Megatron itself: parameters of real models, and flags."""

import argparse
import re

import pytest

from megatron_dynmo.planner import megatron_flags
from megatron_dynmo.planner.megatron_line import read_line
from tests.e2e.training import TINY_GPT, train
from tests.ranks import run_ranks

MODERN = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights "
)
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
MODELS = {
    "dense, tied, biases": "",
    "grouped queries": MODERN
    + "--group-query-attention --num-query-groups 2 --kv-channels 24 --add-qkv-bias "
    "--qk-layernorm --vocab-size 129",
    "softmax offsets, windows": "--softmax-type learnable --window-size 7,0 "
    "--window-attn-skip-freq 2 --quick-geglu --activation-func-clamp-value 7 "
    "--no-bias-gelu-fusion",
    "experts, dense first": MODERN + MOE + "--moe-layer-freq ([0]*1+[1]*3) "
    "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    # Latent attention needs TransformerEngine, so its counts are checked against model cards alone.
    "MTP": MODERN + MOE + "--moe-layer-freq 2 --mtp-num-layers 2",
    "MTP with one set of weights": MODERN + "--mtp-num-layers 2 --mtp-use-repeated-layer",
}


def parameters_by_part(rank, world_size, *argv):
    """Count the parameters of a real model: each decoder layer's, MTP's, all others'."""
    from megatron.training import training

    train_step = training.train_step
    counts = {}

    def counting_step(*args, **kwargs):
        counts.clear()
        for chunk in args[2]:
            for name, parameter in chunk.named_parameters():
                layer = re.search(r"decoder\.layers\.(\d+)\.", name)
                part = layer[1] if layer else "mtp" if "mtp." in name else "others"
                counts[part] = counts.get(part, 0) + parameter.numel()
        return train_step(*args, **kwargs)

    training.train_step = counting_step
    train(rank, world_size, "--train-iters", "1", *argv)
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_real_model(name):
    words = MODELS[name].split()
    (counts,) = run_ranks(parameters_by_part, 1, *words)
    model = read_line([*TINY_GPT, *words], num_stages=1).model
    ours = {
        str(index): layer.num_parameters(model.hidden, model.norm_size)
        for index, layer in enumerate(model.layers)
    }
    mtp = model.num_mtp_parameters
    assert counts == ours | ({"mtp": mtp} if mtp else {}) | {
        "others": model.num_parameters - sum(ours.values())
    }


def megatron_flags_by_name():
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return {option: action for action in parser._actions for option in action.option_strings}


def test_flags_are_megatrons_with_its_defaults():
    theirs = megatron_flags_by_name()
    ours, unread = megatron_flags.parse_flags([])
    assert unread == []
    values = {"_SWITCHES": 0, "_NUMBERS": None, "_TEXTS": None}
    for group, nargs in values.items():
        for name in getattr(megatron_flags, group):
            assert f"--{name}" in theirs, name
            assert theirs[f"--{name}"].nargs == nargs, name
    for group in ("_NUMBERS", "_TEXTS"):
        for name in getattr(megatron_flags, group):
            default = theirs[f"--{name}"].default
            found = getattr(ours, name.replace("-", "_"))
            default = getattr(default, "name", default)
            if name == "pipeline-model-parallel-size":
                continue  # ours may be given by --stages instead
            assert (str(default) if isinstance(found, str) else default) == found, name


def test_flags_that_are_left_out_exist():
    assert set(megatron_flags.LEFT_OUT) <= set(megatron_flags_by_name())


def test_every_flag_that_looks_like_the_model_is_read_left_out_or_known_to_be_harmless():
    read = {
        f"--{name}"
        for group in ("_SWITCHES", "_NUMBERS", "_TEXTS")
        for name in getattr(megatron_flags, group)
    }
    unsorted = [
        flag
        for flag in megatron_flags_by_name()
        if megatron_flags.MODEL_FLAG.match(flag)
        and flag not in read
        and flag not in megatron_flags.LEFT_OUT
        and not megatron_flags.HARMLESS.match(flag)
    ]
    assert unsorted == []

"""Flags that a CPU run needs: added once, never against the user."""

import logging

import pytest

from megatron_dynmo.cpu.arguments import cpu_argument_defaults
from megatron_dynmo.errors import ConfigError

ALL = [
    "--distributed-backend", "gloo", "--transformer-impl", "local",
    "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion",
    "--no-rope-fusion", "--no-persist-layer-norm",
]  # fmt: skip


def test_all_are_added_to_an_empty_command_line_and_one_line_says_so(caplog) -> None:
    with caplog.at_level(logging.INFO, "megatron_dynmo.cpu.arguments"):
        assert cpu_argument_defaults(["--num-layers", "4"]) == ALL
    (record,) = caplog.records
    assert record.getMessage().endswith(" ".join(ALL))


def test_only_rank_0_speaks(caplog, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO, "megatron_dynmo.cpu.arguments"):
        cpu_argument_defaults([])
    assert not caplog.records


@pytest.mark.parametrize("words", [ALL, ["--transformer-impl=local", *ALL[:2], *ALL[4:]]])
def test_nothing_is_repeated(words, caplog) -> None:
    with caplog.at_level(logging.INFO, "megatron_dynmo.cpu.arguments"):
        assert cpu_argument_defaults(words) == []
    (record,) = caplog.records
    assert record.getMessage().endswith("none")


def test_what_it_adds_is_enough_for_itself() -> None:
    assert cpu_argument_defaults(cpu_argument_defaults([])) == []


def test_the_last_of_a_repeated_flag_counts() -> None:
    words = ["--transformer-impl", "transformer_engine", "--transformer-impl", "local"]
    assert "--transformer-impl" not in cpu_argument_defaults(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--distributed-backend nccl", "write --distributed-backend gloo"),
        ("--distributed-backend=nccl", "write --distributed-backend gloo"),
        ("--transformer-impl transformer_engine", "write --transformer-impl local"),
        ("--fp8-format hybrid", "--fp8-format hybrid needs CUDA"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local needs CUDA"),
        ("--enable-cuda-graph", "--enable-cuda-graph needs a CUDA device"),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex needs CUDA"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2 needs NCCL"),
        ("--num-experts 4", "add --disable-bias-linear"),
    ],
)
def test_a_contradiction_is_one_line_that_names_the_flag_and_the_remedy(words, message) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        cpu_argument_defaults(words.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "--cuda-graph-impl none",
        "--attention-backend unfused",
        "--moe-token-dispatcher-type alltoall",
        "--num-experts 4 --disable-bias-linear",
    ],
)
def test_a_value_that_works_is_let_through(words) -> None:
    assert cpu_argument_defaults(words.split()) == ALL

"""Buckets by schedule and by content, what they are expected to cost, and what is refused."""

from argparse import Namespace

import pytest
import torch

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.protocol import Step
from megatron_dynmo.dynamics.sparse_attention import dynamic as module
from megatron_dynmo.dynamics.sparse_attention.block_attention import BLOCK_SIZE
from megatron_dynmo.dynamics.sparse_attention.cost import (
    core_share,
    expected_density,
    relative_times,
)
from megatron_dynmo.dynamics.sparse_attention.dynamic import SparseAttention
from megatron_dynmo.dynamics.sparse_attention.hash_attention import hash_attention
from megatron_dynmo.dynamics.sparse_attention.support import refusals
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.bucket_schedule import BucketSchedule

HASH = ("--dynmo-sparse-attention", "hash")
ARGS = Namespace(
    **dict(num_layers=4, hidden_size=256, ffn_hidden_size=1024, num_attention_heads=4),
    **dict(
        kv_channels=64,
        num_query_groups=1,
        group_query_attention=False,
        num_experts=None,
        swiglu=False,
    ),
    **dict(seq_length=2048, transformer_impl="local", iteration=0, seed=1234),
)


def config(*flags):
    return DynMoConfig.from_argv([*HASH, *flags])


def dynamic(*flags):
    return SparseAttention(config(*flags), ARGS)


def test_a_schedule_by_iteration_and_layer():
    schedule = BucketSchedule.parse("0:1; 100:4; 100:2@3-4,7; 200:8@1")
    assert [schedule.at(99, n) for n in (1, 4)] == [1, 1]
    assert [schedule.at(100, n) for n in (1, 2, 3, 4, 5, 7)] == [4, 4, 2, 2, 4, 2]
    assert [schedule.at(1000, n) for n in (1, 2)] == [8, 4]
    assert schedule.changes and schedule.last_layer == 7
    only = BucketSchedule.parse("5:4@2;9:1@3")
    assert [only.at(9, n) for n in (1, 2, 3)] == [1, 4, 1]
    assert [only.touches(n) for n in (1, 2, 3)] == [False, True, False]
    assert BucketSchedule.parse("16").at(0, 3) == 16


@pytest.mark.parametrize(
    ("text", "named"),
    [
        *[("", "empty"), ("four", "'four'"), ("0:0", "'0:0'"), ("1:2:3", "'1:2:3'")],
        *[("0:4@3-1", "'0:4@3-1'"), ("0:4@0", "'0:4@0'"), ("0:4@1-", "'0:4@1-'")],
        *[("9:4;3:8", "3 follows 9"), ("0:4@1--2", "'0:4@1--2'")],
    ],
)
def test_a_wrong_schedule_is_named(text, named):
    with pytest.raises(ConfigError, match=f"--dynmo-sparse-attention-buckets.*{named}"):
        config("--dynmo-sparse-attention-buckets", text)


def test_flags_that_do_not_fit_together():
    with pytest.raises(ConfigError, match="leave one of the two"):
        config("--dynmo-sparse-attention-density", "0.3", "--dynmo-sparse-attention-buckets", "3:4")
    for words in (("-buckets", "8"), ("-density", "0.3")):
        with pytest.raises(ConfigError, match="no effect without --dynmo-sparse-attention"):
            DynMoConfig.from_argv(["--dynmo-sparse-attention" + words[0], words[1]])
    with pytest.raises(ConfigError, match=r"names layer 9.* has 4"):
        dynamic("--dynmo-sparse-attention-buckets", "0:4@9")


def test_more_buckets_than_tokens_are_refused_before_memory_is_asked_for():
    with pytest.raises(ConfigError, match="999999999 buckets of a sequence of 2048 tokens"):
        dynamic("--dynmo-sparse-attention-buckets", "0:4;9:999999999")


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        *[("context_parallel_size", 2), ("attention_dropout", 0.1), ("window_size", (128, 0))],
        *[("softmax_type", "learnable"), ("reset_attention_mask", True), ("sft", True)],
        *[("sequence_packing_scheduler", "dp_balanced"), ("qk_clip", True)],
        *[("dataloader_inter_document_masking", True), ("cuda_graph_impl", "local")],
    ],
)
def test_features_that_are_refused(feature, value):
    args = Namespace(attention_dropout=0.0, context_parallel_size=1, softmax_type="vanilla")
    assert refusals(config(), args) == []
    setattr(args, feature, value)
    (reason,) = refusals(config(), args)
    assert "--" + feature.replace("_", "-") in reason


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("buckets", [1, 2, 4, 8, 16, 64])
def test_expected_density_is_what_even_buckets_compute(buckets, rounds):
    length = 2048
    codes = torch.stack([torch.arange(length) // r % buckets for r in (1, 7)][:rounds])
    vectors = torch.randn(1, length, 4)
    with torch.no_grad():
        _, computed = hash_attention(
            *(vectors, vectors, vectors, codes.unsqueeze(1), codes.unsqueeze(1)), softmax_scale=1.0
        )
    density = float(computed) / (length * (length + 1) / 2)
    expected = expected_density(buckets, rounds, length)
    if buckets == 1:
        # Megatron's own attention does it; here the blocks on the diagonal are computed whole.
        assert expected == 1 and density / rounds < 1 + BLOCK_SIZE / length
    else:
        assert density == pytest.approx(expected, rel=0.1)


def test_expected_times_fall_with_the_share_that_attention_has():
    assert core_share(ARGS) == pytest.approx(4 / (4 + 1 + 2))  # scores, projections, MLP
    forward, backward = relative_times(0.25, ARGS)
    assert forward == pytest.approx(3 / 7 + 4 / 7 * 0.125)
    assert forward < backward < 1
    assert relative_times(1.0, Namespace(**{**vars(ARGS), "transformer_impl": "te"})) == (1.0, 1.0)


class Run:
    device = torch.device("cpu")


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(module.dist, "all_reduce", lambda tensor: None)


def step(dynamic, iteration, density=None):
    """Run a step in which layer 1 computes this share of its scores."""
    dynamic.begin_iteration(iteration)
    if density is not None:
        for _ in range(2):  # micro-batches
            dynamic._add(1, torch.tensor(round(density * 1000)), 1000)
    return dynamic.after_step(Step(iteration, Run(), None))


def test_a_schedule_takes_effect_after_its_iteration_and_survives_a_resume(one_rank):
    flags = ("--dynmo-sparse-attention-buckets", "0:1;3:4@1")
    first = dynamic(*flags)
    assert step(first, 1) is None and step(first, 2) is None
    assert first.factors(1) == (1.0, 1.0)
    event = step(first, 3)
    assert event["buckets"] == [4, 1, 1, 1]
    assert event["density"][0] == pytest.approx(expected_density(4, 1, 2048), abs=1e-4)
    assert first.factors(1).forward < 1 and first.factors(2) == (1.0, 1.0)
    resumed = dynamic(*flags)
    resumed.restore(first.state())
    assert resumed.factors(1) == first.factors(1)
    resumed.begin_iteration(4)
    first.begin_iteration(4)
    assert resumed._hashing(1) == first._hashing(1)
    assert first._hashing(1).iteration == 4 and first._hashing(1).buckets == 4


def test_the_content_is_news_only_when_it_has_changed(one_rank):
    one = dynamic()
    assert step(one, 1, density=0.6)["density"][0] == 0.6
    assert step(one, 2, density=0.62) is None
    assert one.counters()["density_layer_1"] == pytest.approx(0.62)
    assert step(one, 3, density=0.45)["density"][0] == 0.45


def test_buckets_follow_the_content_to_the_wished_density(one_rank):
    one = dynamic("--dynmo-sparse-attention-density", "0.5")
    for iteration in range(1, 101):
        # Skewed content: three times as many scores as even buckets would have.
        step(one, iteration, min(1.0, 3 * expected_density(one._buckets[0], 1, 2048)))
    assert 3 * expected_density(one._buckets[0], 1, 2048) == pytest.approx(0.5, rel=0.2)
    few = one._buckets[0]
    for iteration in range(101, 201):
        step(one, iteration, expected_density(one._buckets[0], 1, 2048))
    assert one._buckets[0] < few, "even content needs fewer buckets"
    again = dynamic("--dynmo-sparse-attention-density", "0.5")
    again.restore(one.state())
    assert again._buckets == one._buckets


@pytest.mark.parametrize("state", [None, {}, {"buckets": [4], "density": [1.0]}, {"buckets": 3}])
def test_a_damaged_state_is_refused(state):
    with pytest.raises(ConfigError, match="sparse_attention"):
        dynamic().restore(state)

"""What each rank gets of a micro-batch: stages, tensor-parallel twins, packed sequences.

Packed sequences cannot be trained here, since only TransformerEngine's attention takes them, so
what reaches the model is checked instead.
"""

import argparse
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_ranks

SEQUENCE = 8
# Where the documents of two samples end; a row is padded with the sequence's length.
DOCUMENTS = [[0, 3, 8], [0, 5, 6, 8]]
MERGED = [0, 3, 8, 13, 14, 16]


def sample(is_packed: bool) -> dict[str, Any]:
    """Return a collated micro-batch of two samples, with a field that no stage needs."""
    import torch

    tokens = torch.arange(2 * SEQUENCE).reshape(2, SEQUENCE)
    fields = {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": (tokens % 3 > 0).float(),
        "position_ids": torch.arange(SEQUENCE).repeat(2, 1),
        "dataset_id": torch.tensor([0, 1]),
    }
    if is_packed:
        rows = [row + [SEQUENCE] * (SEQUENCE + 1 - len(row)) for row in DOCUMENTS]
        fields["cu_seqlens"] = torch.tensor(rows, dtype=torch.int32)
        fields["max_seqlen"] = torch.tensor([5, 5], dtype=torch.int32)
    return fields


def arguments(tp: int, pp: int, **given: Any) -> argparse.Namespace:
    defaults = {
        "sft": False,
        "dataloader_inter_document_masking": False,
        "mtp_num_layers": None,
        "hybrid_context_parallel": False,
        "create_attention_mask_in_dataloader": False,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "micro_batch_size": 2,
        "seq_length": SEQUENCE,
        "untie_embeddings_and_output_weights": False,
    }
    return argparse.Namespace(**{**defaults, **given})


def get_batch(rank: int, world_size: int, tp: int, pp: int, given: dict[str, Any]) -> Any:
    """Fetch one micro-batch; return its fields, what the attention is told, and who reads data."""
    from megatron.core import parallel_state
    from megatron.training.global_vars import set_args

    from megatron_dynmo.cpu import cpu_specs
    from megatron_dynmo.patching import patched

    with patched(cpu_specs()):
        from megatron_dynmo.adapters import gpt_stages, gpt_step

        set_args(arguments(tp, pp, **given))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
        )
        is_packed = given.get("sft", False) or given.get("dataloader_inter_document_masking", False)
        reads = gpt_stages.reads_data(None, is_packed)
        # A rank that may not read has nothing to read from.
        source = iter([sample(is_packed)] if reads else [])
        batch = gpt_step.get_batch(source)
        packed = gpt_step._packed_seq_params(batch, SEQUENCE)
        fields = {
            name: None if value is None else value.numpy()
            for name, value in batch._asdict().items()
        }
        told = packed and {
            "boundaries": packed.cu_seqlens_q.tolist(),
            "longest": packed.max_seqlen_kv,
            "format": packed.qkv_format,
            "tokens_per_sample": packed.tokens_per_sample,
        }
        return fields, told, reads, gpt_stages.get_embedding_ranks(list(range(pp)))


def names(fields: dict[str, Any]) -> set[str]:
    return {name for name, value in fields.items() if value is not None}


FIRST = {"tokens", "position_ids"}
LAST = {"labels", "loss_mask"}
BOUNDARIES = {"cu_seqlens", "max_seqlen"}


def test_a_pipeline_of_three():
    results = run_ranks(get_batch, 3, 1, 3, {})
    assert [names(fields) for fields, *_ in results] == [FIRST, set(), LAST]
    assert [reads for _, _, reads, _ in results] == [True, False, True]
    assert all(told is None for _, told, *_ in results)
    assert [ranks for *_, ranks in results] == [[0, 2]] * 3
    expected = {name: value.numpy() for name, value in sample(False).items()}
    for fields, *_ in results:
        for name in names(fields):
            np.testing.assert_array_equal(fields[name], expected[name])


@pytest.mark.parametrize("flag", ["sft", "dataloader_inter_document_masking"])
def test_every_stage_hears_where_packed_documents_end(flag):
    results = run_ranks(get_batch, 3, 1, 3, {flag: True})
    stages = [names(fields) for fields, *_ in results]
    assert stages == [FIRST | BOUNDARIES, BOUNDARIES, LAST | BOUNDARIES]
    for fields, told, *_ in results:
        assert told == {
            "boundaries": MERGED,
            "longest": 5,
            "format": "thd",
            "tokens_per_sample": SEQUENCE,
        }
        for name in names(fields) & (FIRST | LAST):
            assert fields[name].shape == (1, 2 * SEQUENCE)


@pytest.mark.parametrize("flag", [None, "sft"])
def test_tensor_parallel_twins_get_the_same(flag):
    (first, told, reads, _), (second, told_too, reads_too, _) = run_ranks(
        get_batch, 2, 2, 1, {flag: True} if flag else {}
    )
    assert (reads, reads_too) == (True, False)
    assert told == told_too
    assert names(first) == names(second) >= FIRST | LAST
    for name in names(first):
        np.testing.assert_array_equal(first[name], second[name])


def loss_of(rank: int, world_size: int, given: dict[str, Any]) -> Any:
    """Reduce two losses per token; return what Megatron gets and the checks it was asked for."""
    import torch
    from megatron.training.global_vars import set_args

    from megatron_dynmo.adapters import gpt_step

    checks: list[tuple[str, bool, bool]] = []

    class Machine:
        def is_unexpectedly_large(self, result, threshold, context):
            return bool(result > threshold)

        def validate_result(self, result, rejection_func, message, tolerance, fatal):
            checks.append((message, bool(rejection_func(result)), fatal))

    gpt_step.get_rerun_state_machine = Machine
    set_args(argparse.Namespace(logits_load_dir=None, **given))
    losses = torch.tensor(given.pop("losses", [[1.5, 2.0, 4.0]]))
    loss, tokens, report = gpt_step.loss_func(torch.tensor([[1.0, 0.0, 1.0]]), losses)
    return loss.item(), (tokens.item(), str(tokens.dtype)), report["lm loss"].tolist(), checks


def test_loss_is_the_sum_over_the_tokens_that_count():
    given = {"check_for_nan_in_loss_and_grad": False, "check_for_spiky_loss": False}
    (result,) = run_ranks(loss_of, 1, given)
    assert result == (5.5, (2, "torch.int32"), [5.5, 2.0], [])


def test_loss_is_checked_as_the_flags_ask():
    given = {"check_for_nan_in_loss_and_grad": True, "check_for_spiky_loss": True}
    (result,) = run_ranks(loss_of, 1, {**given, "losses": [[float("inf"), 0.0, 1.0]]})
    assert result[3] == [
        ("found NaN in local forward loss calculation", False, True),
        ("found Inf in local forward loss calculation", True, True),
        ("Spiky loss", True, False),
    ]

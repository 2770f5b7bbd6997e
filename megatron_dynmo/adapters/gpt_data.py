"""The training, validation and test data of a GPT, from Megatron's arguments."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, print_rank_0
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_dynmo.adapters.gpt_stages import reads_data
from megatron_dynmo.adapters.split_check import require_documents


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Build the three data sets.

    Args:
        train_val_test_num_samples: Samples wanted of each; None is one pass over the data.
        vp_stage: Virtual stage of the model chunk, None without virtual stages.

    Returns:
        Training, validation (a list of them with `--multiple-validation-sets`) and test data; None
        on ranks that read no data.

    Raises:
        ConfigError: `--split` leaves a part of the data without documents.

    Collective:
        All ranks, once: the builder has rank 0 write the index caches first.
    """
    args = get_args()
    dataset_type = _dataset_type(args)
    config = dataset_config(args)
    if not args.sft:
        require_documents(config, train_val_test_num_samples)
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    train, valid, test = BlendedMegatronDatasetBuilder(
        dataset_type,
        train_val_test_num_samples,
        functools.partial(reads_data, vp_stage, is_packed=args.sft),
        config,
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return train, valid, test


# Megatron calls a provider with this mark on every rank, the others on tensor-parallel rank 0 only.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _dataset_type(args: argparse.Namespace) -> type[Any]:
    """Choose the class of the data; when several flags are given, Megatron's order decides."""
    if args.sft:
        return SFTDataset
    if args.mock_data:
        return MockGPTDataset
    if args.fim_data:
        return GPTFIMDataset
    return GPTDataset


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """Translate Megatron's arguments into the config of the data sets.

    Args:
        args: Megatron's validated arguments.

    Returns:
        A GPTDatasetConfig, or a GPTFIMDatasetConfig with `--fim-data`.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    fields: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": build_tokenizer(args),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "object_storage_cache_path": args.object_storage_cache_path,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "sequences_per_dataset": _sequences_per_dataset(args.per_dataset_sequences_path),
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "context_parallel_size": args.context_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "hybrid_context_parallel": args.hybrid_context_parallel,
        "inter_document_masking": args.dataloader_inter_document_masking,
    }
    if args.fim_data:
        return GPTFIMDatasetConfig(**fields, **_fim_fields(args))
    return GPTDatasetConfig(**fields)


def _sequences_per_dataset(path: str | None) -> dict[str, Any] | None:
    """Read the counts of `--per-dataset-sequences-path`, which spare opening every index."""
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        counts: dict[str, Any] = json.load(file)
    return counts


def _fim_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that fill-in-the-middle adds."""
    return {
        "fim_rate": args.fim_rate,
        "fim_spm_rate": args.fim_spm_rate,
        "fim_extra_tokens": {
            "prefix": args.fim_prefix_token,
            "middle": args.fim_middle_token,
            "suffix": args.fim_suffix_token,
            "pad": args.fim_pad_token,
            "eod": args.fim_eod_token,
        },
        "fim_split_sample": args.fim_split_sample,
        "fim_fragment_rate": args.fim_fragment_rate,
        "fim_no_prefix": args.fim_no_prefix,
    }

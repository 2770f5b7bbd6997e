"""A user's own training script in the manner of a fork of Megatron's: knows nothing of DynMo.

It builds its model through the repository-root modules, makes its batches and its loss itself, and
has a flag of its own.
"""

from functools import partial

import torch
from gpt_builders import gpt_builder
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import (
    get_blend_and_blend_per_split,
    get_ltor_masks_and_position_ids,
    is_first_or_last_pipeline_stage,
    print_rank_0,
)
from model_provider import model_provider


def add_own_arguments(parser):
    group = parser.add_argument_group("fork")
    group.add_argument("--greeting", default="hello")
    return parser


def batch_of(data_iterator):
    if not is_first_or_last_pipeline_stage(None):
        return None, None, None, None, None
    sample = next(data_iterator)
    tokens, labels = sample["tokens"], sample["labels"]
    mask, loss_mask, positions = get_ltor_masks_and_position_ids(
        tokens, 0, 0, False, False, False, False
    )
    return tokens, labels, sample.get("loss_mask", loss_mask), mask, positions


def summed_loss(loss_mask, output):
    loss = (output.reshape(-1).float() * loss_mask.reshape(-1).float()).sum()
    num_tokens = loss_mask.sum().int()
    both = torch.stack([loss.detach(), num_tokens.float()])
    return loss, num_tokens, {"lm loss": both}


def forward(data_iterator, model):
    get_timers()("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, mask, positions = batch_of(data_iterator)
    get_timers()("batch-generator").stop()
    return model(tokens, positions, mask, labels=labels), partial(summed_loss, loss_mask)


def datasets(num_samples):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        kind, num_samples, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    ).build()


datasets.is_distributed = True

if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_own_arguments)
    print_rank_0(f"{args.greeting} from the fork")
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets,
        ModelType.encoder_or_decoder,
        forward,
        model_provider=partial(model_provider, gpt_builder),
    )

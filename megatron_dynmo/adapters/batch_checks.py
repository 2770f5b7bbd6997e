"""Batch sizes that cannot be divided, named before Megatron builds anything.

Megatron's own messages come late, after the model is built, or speak of flags that the user never
gave. Read from the arguments right after they are parsed.
"""

from __future__ import annotations

import itertools
from argparse import Namespace

from megatron_dynmo.errors import ConfigError


def require_legal_batches(args: Namespace) -> None:
    """Refuse a global batch that does not split into whole micro-batches, or into too few.

    Args:
        args: Megatron's arguments before validation, with `world_size`.

    Raises:
        ConfigError: Names the batch sizes, the number of replicas, and sizes that work.
    """
    num_stages = args.pipeline_model_parallel_size
    ranks_per_replica = args.tensor_model_parallel_size * num_stages * args.context_parallel_size
    if args.micro_batch_size is None or args.world_size % ranks_per_replica:
        return  # Megatron's own answer to these is clear
    num_replicas = args.world_size // ranks_per_replica
    unit = args.micro_batch_size * num_replicas
    size = args.global_batch_size
    if size is None or args.step_batch_size_schedule is not None:
        return
    if not args.decrease_batch_size_if_needed:
        _require_whole_micro_batches(size, args.micro_batch_size, num_replicas)
    if _has_virtual_stages(args):
        group = args.microbatch_group_size_per_vp_stage or num_stages
        _require_full_groups(size // unit, group, num_stages, unit)


def _require_whole_micro_batches(size: int, micro_batch_size: int, num_replicas: int) -> None:
    unit = micro_batch_size * num_replicas
    if size % unit:
        below, above = size // unit * unit, (size // unit + 1) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"--global-batch-size {size} is not a multiple of --micro-batch-size "
            f"{micro_batch_size} times {num_replicas} data-parallel replicas (= {unit}); try {near}"
        )


def _has_virtual_stages(args: Namespace) -> bool:
    """Whether flags ask for virtual stages; a layout string may do so too and is left alone."""
    return args.pipeline_model_parallel_size > 1 and (
        args.num_layers_per_virtual_pipeline_stage is not None
        or (args.num_virtual_stages_per_pipeline_rank or 1) > 1
    )


def _require_full_groups(num_microbatches: int, group: int, num_stages: int, unit: int) -> None:
    """Check what the interleaved schedule asks of the number of micro-batches.

    Source: the two ValueErrors of `forward_backward_pipelining_with_interleaving` in
    megatron/core/pipeline_parallel/schedules.py@core_v0.19.0.
    """

    def is_legal(count: int) -> bool:
        return count >= group and (count % group == 0 or count % group >= num_stages)

    if group < num_stages or is_legal(num_microbatches):
        return
    above = next(filter(is_legal, itertools.count(num_microbatches)))
    below = next(filter(is_legal, range(num_microbatches, 0, -1)), None)
    near = [count * unit for count in (below, above) if count is not None]
    raise ConfigError(
        f"virtual stages need M micro-batches with M >= {group} and a remainder of M / {group} "
        f"that is 0 or at least {num_stages} (pipeline stages), but M is {num_microbatches}; "
        f"try --global-batch-size {' or '.join(map(str, near))}"
    )

"""What happens to Megatron's arguments between parsing and validation."""

from __future__ import annotations

from argparse import Namespace

from megatron_dynmo.adapters import checkpoint, support
from megatron_dynmo.adapters.batch_checks import require_legal_batches
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.layout import LayerLayout


def prepare(args: Namespace) -> None:
    """Check parsed arguments before Megatron validates them.

    Args:
        args: fresh from the parser, with the `dynmo_*` attributes.

    Raises:
        ConfigError: A feature in use under which no layer can be moved, or a batch that cannot be
            divided.
        LayoutError: A split that is not legal, or a forced layout that does not fit the model.
    """
    config = DynMoConfig.from_namespace(args)
    if getattr(args, "yaml_cfg", None) is not None:
        return  # the model's size is not known yet; checked again when training is set up
    saved = checkpoint.saved_arguments(args)
    if config.mode == "balance" and args.pipeline_model_parallel_size > 1:
        checkpoint.restore_layout(args, saved)
    checkpoint.restore_memory(args, saved)
    checkpoint.restore_dynamics(args, saved, config.dynamics)
    checkpoint.require_same_buckets(args, saved, config.follows_layers)
    if getattr(args, "use_checkpoint_args", False):
        return  # as above
    if config.dynamics:
        from megatron_dynmo.dynamics import dynamics  # only where asked for: they import kernels

        dynamics.require_supported(config, args)
    support.require_legal_split(args)
    require_legal_batches(args)
    if config.mode == "balance" and args.pipeline_model_parallel_size > 1:
        support.require_movable(args)
        for move in config.forced_moves:
            LayerLayout.from_megatron(
                move.layout,
                num_layers=args.num_layers,
                num_stages=args.pipeline_model_parallel_size,
            )

"""Stand-in for the repository-root module `model_provider`: hands a builder its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.training import get_args, print_rank_0


def model_provider(
    model_builder: Callable[..., Any],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Build this rank's model chunk with `model_builder`.

    Args:
        model_builder: Called with Megatron's arguments, then the arguments below.
        pre_process: Whether the chunk holds the embedding.
        post_process: Whether the chunk holds the output layer.
        vp_stage: Virtual stage, None without virtual stages.
        config: TransformerConfig to use instead of the one in Megatron's arguments.
        pg_collection: Process groups; None leaves the choice to the builder.

    Returns:
        What the builder returns.
    """
    return model_builder(
        get_args(), pre_process, post_process, vp_stage, config=config, pg_collection=pg_collection
    )


def count_parameters_in_layer(model: Any, layer_name: str) -> int:
    """Print and sum the sizes of the parameters whose name holds `layer_name`."""
    total = 0
    for name, parameter in model.named_parameters():
        if layer_name in name:
            total += parameter.numel()
            print_rank_0(f" - {name}: {parameter.numel()}")
    return total

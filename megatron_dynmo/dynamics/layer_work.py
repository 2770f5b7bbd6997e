"""What a layer's work is made of, as shares of its matrix products.

Pure. For expected costs only: what is measured overrides them.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkShares:
    """Parts of a layer's work, which add up to 1.

    Attributes:
        pairs: attention core: grows with pairs of tokens.
        experts: routed experts of an MoE layer.
        rest: everything else.
    """

    pairs: float
    experts: float
    rest: float

    @classmethod
    def of_run(cls, args: Namespace, *, is_moe: bool) -> WorkShares:
        """Read Megatron's arguments.

        Args:
            args: validated.
            is_moe: whether the layer's MLP is an MoE block.
        """
        width = args.kv_channels * args.num_attention_heads
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        projections = 2 * args.hidden_size * (width + args.kv_channels * groups)
        # Flash attention leaves out what a causal mask hides.
        seen = args.seq_length if args.transformer_impl == "local" else args.seq_length / 2
        pairs = 2 * seen * width
        matrices = (3 if args.swiglu else 2) * args.hidden_size
        mlp, experts = matrices * args.ffn_hidden_size, 0
        if is_moe:
            mlp = matrices * (args.moe_shared_expert_intermediate_size or 0)
            experts = matrices * args.moe_router_topk
            experts *= args.moe_ffn_hidden_size or args.ffn_hidden_size
        total = pairs + experts + projections + mlp
        return cls(pairs / total, experts / total, (projections + mlp) / total)


def is_moe_layer(args: Namespace, layer_number: int) -> bool:
    """Whether a layer of the model, by its 1-based number, is an MoE layer.

    Args:
        args: validated.
        layer_number: of any layer of the model.
    """
    if args.num_experts is None:
        return False
    frequency = args.moe_layer_freq
    if isinstance(frequency, list):
        return bool(frequency[layer_number - 1])
    return bool((layer_number - 1) % frequency == 0)

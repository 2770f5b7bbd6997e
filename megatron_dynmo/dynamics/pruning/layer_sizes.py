"""Sizes of the matrices of a transformer layer, and what share of its work each one is.

Tier: pure. All layers of the models that are pruned have the same sizes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

MATRICES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class LayerSizes:
    """A dense layer with self-attention and MLP, over all tensor-parallel ranks.

    Attributes:
        hidden: width of the residual stream.
        heads: attention heads.
        groups: query groups; as many as heads without GQA.
        head_width: width of a head.
        ffn: neurons of the MLP.
        gated: whether each neuron has a gate.
        seq_length: tokens that attend to one another.
    """

    hidden: int
    heads: int
    groups: int
    head_width: int
    ffn: int
    gated: bool
    seq_length: int

    @classmethod
    def of(cls, args: Namespace) -> LayerSizes:
        """Read Megatron's arguments, validated."""
        heads = args.num_attention_heads
        return cls(
            hidden=args.hidden_size,
            heads=heads,
            groups=cls.groups_of(args),
            head_width=args.kv_channels,
            ffn=args.ffn_hidden_size,
            gated=bool(args.swiglu or getattr(args, "quick_geglu", False)),
            seq_length=args.seq_length,
        )

    @staticmethod
    def groups_of(args: Namespace) -> int:
        """Query groups of a layer, also before the arguments are validated."""
        heads: int = args.num_attention_heads or 0
        groups: int = args.num_query_groups if args.group_query_attention else heads
        return groups

    def shape(self, matrix: str) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs) of a matrix."""
        inner = self.heads * self.head_width
        shapes = {
            "linear_qkv": (inner + 2 * self.groups * self.head_width, self.hidden),
            "linear_proj": (self.hidden, inner),
            "linear_fc1": (self.ffn * (2 if self.gated else 1), self.hidden),
            "linear_fc2": (self.hidden, self.ffn),
        }
        return shapes[matrix]

    def num_weights(self, matrix: str) -> int:
        """Weights of a matrix."""
        rows, columns = self.shape(matrix)
        return rows * columns

    @property
    def layer_weights(self) -> int:
        """Weights of all matrices of a layer."""
        return sum(self.num_weights(matrix) for matrix in MATRICES)

    def time_factor(self, matrices: Mapping[str, float], core: float = 1.0) -> float:
        """Time of a layer over that of the untouched layer, by multiplications.

        Args:
            matrices: time of each matrix's product over that of the untouched one.
            core: the same of the products between queries, keys and values.
        """
        core_work = 2 * self.seq_length * self.heads * self.head_width
        whole = self.layer_weights + core_work
        work = sum(self.num_weights(name) * share for name, share in matrices.items())
        return (work + core_work * core) / whole

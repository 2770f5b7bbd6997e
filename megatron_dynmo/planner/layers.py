"""What a transformer layer is made of, as matrices and vectors.

One list of matrices serves everything: parameters are rows times columns, the FLOPs of a token
twice that, and the kind says over which ranks a matrix is split.

Shapes:
Source: megatron/core/transformer/{attention,multi_latent_attention,mlp}.py,
megatron/core/transformer/moe/{router,shared_experts,moe_layer}.py,
megatron/core/transformer/experimental_attention_variant/dsa.py@core_v0.19.2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Attention",
    "DenseMlp",
    "GroupedAttention",
    "Indexer",
    "LatentAttention",
    "Layer",
    "Matrix",
    "MoeMlp",
    "Shard",
    "visible_tokens",
]

type Shard = Literal["tensor", "replicated", "expert"]
"""Split over tensor-parallel ranks, held by all of them, or one share of the experts a rank."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix that tokens are multiplied with.

    Attributes:
        rows: input width.
        columns: output width.
        shard: over which ranks it is split.
        bias: whether columns numbers are added.
        copies: how many there are (experts).
        active: how many of them one token uses.
    """

    rows: int
    columns: int
    shard: Shard = "tensor"
    bias: bool = False
    copies: int = 1
    active: int = 1

    @property
    def num_parameters(self) -> int:
        """Weights and biases of all copies."""
        return self.copies * self.columns * (self.rows + self.bias)

    @property
    def num_active(self) -> int:
        """Weights and biases that one token uses."""
        return self.active * self.columns * (self.rows + self.bias)

    @property
    def flops(self) -> int:
        """FLOPs of one token, forward."""
        return 2 * self.active * self.rows * self.columns


def visible_tokens(seq_length: int, limit: int | None = None) -> float:
    """Tokens that a causal query sees on average, itself included.

    Args:
        seq_length: tokens of a sequence.
        limit: the most that one query sees (window); all before it if None.
    """
    width = seq_length if limit is None else min(limit, seq_length)
    return width - width * (width - 1) / (2 * seq_length)


@dataclass(frozen=True)
class GroupedAttention:
    """Attention with heads that share keys and values in groups; one group a head is MHA.

    Attributes:
        num_heads: query heads.
        num_groups: key and value heads.
        head_dim: width of a head.
        qkv_bias: biases on queries, keys and values.
        output_bias: bias on the output projection.
        qk_norm: norms of queries and of keys, shared by all heads.
        output_gate: a gate on the output, as wide as the queries.
        sinks: one learned softmax offset a head.
        window: tokens that a query sees, itself included; None for all before it.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    sinks: bool = False
    window: int | None = None

    @property
    def query_width(self) -> int:
        """All query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kept_width(self) -> int:
        """Numbers a token keeps for the backward of the core: queries, keys, values and output."""
        return 2 * self.query_width + 2 * self.num_groups * self.head_dim

    def matrices(self, hidden: int) -> list[Matrix]:
        """Projections of a layer of width hidden."""
        width = self.query_width * (2 if self.output_gate else 1)
        width += 2 * self.num_groups * self.head_dim
        return [
            Matrix(hidden, width, bias=self.qkv_bias),
            Matrix(self.query_width, hidden, bias=self.output_bias),
        ]

    def num_vector_parameters(self, norm_size: int) -> int:
        """Parameters of norms and sinks; norm_size is 1 for RMSNorm, 2 for LayerNorm."""
        return 2 * self.qk_norm * norm_size * self.head_dim + self.sinks * self.num_heads

    def core_flops(self, seq_length: int) -> float:
        """FLOPs of one token in scores and weighted sum, forward."""
        return 4 * self.query_width * visible_tokens(seq_length, self.window)


@dataclass(frozen=True)
class Indexer:
    """Chooses which tokens sparse latent attention looks at.

    Attributes:
        num_heads: heads of the indexer.
        head_dim: width of one.
        top_k: tokens chosen for each query.
    """

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention: queries, keys and values go through low-rank projections.

    Attributes:
        num_heads: heads.
        q_rank: rank of the query projection; None for a full one.
        kv_rank: rank of keys and values.
        nope_dim: width of a head's queries and keys without position.
        rope_dim: width of the part with rotary position; its key is shared by all heads.
        v_dim: width of a head's values.
        qk_norm: norms of the compressed queries, and of the compressed keys and values.
        output_bias: bias on the output projection.
        indexer: of sparse attention; None for dense.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    qk_norm: bool = True
    output_bias: bool = False
    indexer: Indexer | None = None

    @property
    def query_width(self) -> int:
        """All query heads side by side."""
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def kept_width(self) -> int:
        """Numbers a token keeps for the backward of the core: queries, keys, values and output."""
        return 2 * self.query_width + 2 * self.num_heads * self.v_dim

    def matrices(self, hidden: int) -> list[Matrix]:
        """Projections of a layer of width hidden."""
        if self.q_rank is None:
            queries = [Matrix(hidden, self.query_width)]
        else:
            queries = [
                Matrix(hidden, self.q_rank, "replicated"),
                Matrix(self.q_rank, self.query_width),
            ]
        return [
            *queries,
            Matrix(hidden, self.kv_rank + self.rope_dim, "replicated"),
            Matrix(self.kv_rank, self.num_heads * (self.nope_dim + self.v_dim)),
            Matrix(self.num_heads * self.v_dim, hidden, bias=self.output_bias),
            *self._indexer_matrices(hidden),
        ]

    def num_vector_parameters(self, norm_size: int) -> int:
        """Parameters of the norms; norm_size is 1 for RMSNorm, 2 for LayerNorm."""
        # The indexer's key norm is a LayerNorm whatever the model's norm is.
        of_indexer = 0 if self.indexer is None else 2 * self.indexer.head_dim
        return self.qk_norm * norm_size * ((self.q_rank or 0) + self.kv_rank) + of_indexer

    def core_flops(self, seq_length: int) -> float:
        """FLOPs of one token in scores, weighted sum and indexer, forward."""
        chosen = None if self.indexer is None else self.indexer.top_k
        widths = self.query_width + self.num_heads * self.v_dim
        flops = 2 * widths * visible_tokens(seq_length, chosen)
        if self.indexer is not None:
            index_width = self.indexer.num_heads * self.indexer.head_dim
            flops += 2 * index_width * visible_tokens(seq_length)
        return flops

    def _indexer_matrices(self, hidden: int) -> list[Matrix]:
        if self.indexer is None:
            return []
        heads, width = self.indexer.num_heads, self.indexer.head_dim
        return [
            Matrix(self.q_rank or hidden, heads * width, "replicated"),
            Matrix(hidden, width, "replicated"),
            Matrix(hidden, heads, "replicated"),
        ]


type Attention = GroupedAttention | LatentAttention


@dataclass(frozen=True)
class DenseMlp:
    """A feed-forward block that every token goes through.

    Attributes:
        ffn: inner width.
        gated: two inner projections, one gates the other (SwiGLU).
        bias: biases on both projections.
    """

    ffn: int
    gated: bool = True
    bias: bool = False

    @property
    def active_ffn(self) -> int:
        """Inner width that one token uses."""
        return self.ffn

    def matrices(self, hidden: int) -> list[Matrix]:
        """Projections of a layer of width hidden."""
        return _feed_forward(hidden, self.ffn, self.gated, self.bias)


@dataclass(frozen=True)
class MoeMlp:
    """A feed-forward block of which a router picks experts for every token.

    Attributes:
        num_experts: routed experts.
        top_k: experts of one token.
        ffn: inner width of an expert.
        shared_ffn: inner width of the shared experts together; 0 for none.
        gated: two inner projections, one gates the other (SwiGLU).
        bias: biases on the experts and the router.
        shared_gate: a gate on the shared experts.
        latent: width that routed experts work at; the layer's if None.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    gated: bool = True
    bias: bool = False
    shared_gate: bool = False
    latent: int | None = None

    @property
    def active_ffn(self) -> int:
        """Inner width that one token uses, over its experts."""
        return self.top_k * self.ffn + self.shared_ffn

    def matrices(self, hidden: int) -> list[Matrix]:
        """Router, experts and shared experts of a layer of width hidden."""
        parts = [Matrix(hidden, self.num_experts, "replicated", bias=self.bias)]
        if self.latent is not None:
            parts.append(Matrix(hidden, self.latent, "replicated", bias=self.bias))
            parts.append(Matrix(self.latent, hidden, "replicated", bias=self.bias))
        width = hidden if self.latent is None else self.latent
        for one in _feed_forward(width, self.ffn, self.gated, self.bias):
            rows, columns = one.rows, one.columns
            parts.append(Matrix(rows, columns, "expert", self.bias, self.num_experts, self.top_k))
        if self.shared_ffn:
            parts += _feed_forward(hidden, self.shared_ffn, self.gated, self.bias)
        if self.shared_gate:
            parts.append(Matrix(hidden, 1, "replicated"))
        return parts


@dataclass(frozen=True)
class Layer:
    """One transformer layer: two norms, attention and a feed-forward block."""

    attention: Attention
    mlp: DenseMlp | MoeMlp

    def matrices(self, hidden: int) -> list[Matrix]:
        """Every matrix of the layer."""
        return self.attention.matrices(hidden) + self.mlp.matrices(hidden)

    def num_vector_parameters(self, hidden: int, norm_size: int) -> int:
        """Parameters outside matrices, all replicated."""
        return 2 * norm_size * hidden + self.attention.num_vector_parameters(norm_size)

    def num_parameters(self, hidden: int, norm_size: int) -> int:
        """All parameters."""
        vectors = self.num_vector_parameters(hidden, norm_size)
        return vectors + count(self.matrices(hidden))

    def num_active(self, hidden: int, norm_size: int) -> int:
        """Parameters that one token uses."""
        vectors = self.num_vector_parameters(hidden, norm_size)
        return vectors + sum(one.num_active for one in self.matrices(hidden))


def count(matrices: Iterable[Matrix], shard: Shard | None = None) -> int:
    """Parameters of matrices, of one kind or of all."""
    return sum(one.num_parameters for one in matrices if shard in (None, one.shard))


def _feed_forward(hidden: int, ffn: int, gated: bool, bias: bool) -> list[Matrix]:
    return [Matrix(hidden, ffn * (2 if gated else 1), bias=bias), Matrix(ffn, hidden, bias=bias)]

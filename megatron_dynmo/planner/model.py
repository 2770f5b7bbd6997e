"""A whole GPT as the planner sees it, and how many parameters it has."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dynmo.planner.layers import Layer, Matrix, Shard, count

__all__ = ["Model", "padded_vocab_size"]


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """The vocabulary that Megatron builds: the next multiple of divisible_by x tensor_parallel.

    Source: megatron/core/tokenizers/utils/build_tokenizer.py@core_v0.19.2
    """
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    Attributes:
        hidden: width of the residual stream.
        layers: decoder layers in order, without MTP.
        vocab_size: words, padded.
        tied: whether the output layer shares the embedding's weights.
        norm_size: numbers that a norm has for each of its inputs: 1 RMSNorm, 2 LayerNorm.
        learned_positions: learned absolute positions; 0 for rotary or none.
        mtp_layers: multi-token-prediction layers; each holds a layer like the last one.
        mtp_shared: whether all MTP layers share one set of weights.
    """

    hidden: int
    layers: tuple[Layer, ...]
    vocab_size: int
    tied: bool = False
    norm_size: int = 1
    learned_positions: int = 0
    mtp_layers: int = 0
    mtp_shared: bool = False

    @property
    def num_layers(self) -> int:
        """Decoder layers, without MTP."""
        return len(self.layers)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding and of learned positions."""
        return (self.vocab_size + self.learned_positions) * self.hidden

    @property
    def output(self) -> Matrix:
        """The output layer."""
        return Matrix(self.hidden, self.vocab_size)

    @property
    def final_norm(self) -> int:
        """Parameters of the norm before the output layer."""
        return self.norm_size * self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters but those of MTP, shared weights once; what model cards state."""
        output = 0 if self.tied else self.output.num_parameters
        layers = sum(one.num_parameters(self.hidden, self.norm_size) for one in self.layers)
        return self.embedding + layers + self.final_norm + output

    @property
    def num_active(self) -> int:
        """Parameters that one token uses, embedding and output layer whole, without MTP."""
        layers = sum(one.num_parameters(self.hidden, self.norm_size) for one in self.layers)
        active = sum(one.num_active(self.hidden, self.norm_size) for one in self.layers)
        return self.num_parameters - layers + active

    @property
    def num_mtp_parameters(self) -> int:
        """Parameters of the MTP layers; they share embedding and output layer."""
        sets = min(self.mtp_layers, 1) if self.mtp_shared else self.mtp_layers
        return sets * (count(self.mtp_matrices) + self.mtp_vectors)

    @property
    def mtp_matrices(self) -> list[Matrix]:
        """Matrices of one MTP layer: the projection of hidden state and embedding, and a layer."""
        join = Matrix(2 * self.hidden, self.hidden)
        return [join, *self.layers[-1].matrices(self.hidden)]

    @property
    def mtp_vectors(self) -> int:
        """Parameters of one MTP layer outside matrices: three norms and those of its layer."""
        inner = self.layers[-1].num_vector_parameters(self.hidden, self.norm_size)
        return 3 * self.norm_size * self.hidden + inner

    def parameters_of(self, layer: Layer) -> dict[Shard, int]:
        """Parameters of a layer by how they are split over ranks."""
        vectors = layer.num_vector_parameters(self.hidden, self.norm_size)
        return split_parameters(layer.matrices(self.hidden), vectors)


def split_parameters(matrices: list[Matrix], vectors: int) -> dict[Shard, int]:
    """Parameters by how they are split over ranks; vectors are replicated."""
    return {
        "tensor": count(matrices, "tensor"),
        "replicated": count(matrices, "replicated") + vectors,
        "expert": count(matrices, "expert"),
    }

"""How a model is trained: parallelism, batch, precision, recompute, and the device's speed."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_dynmo.planner.layers import Shard

__all__ = ["Device", "Precision", "Recompute", "Setup"]


@dataclass(frozen=True)
class Precision:
    """Bytes of one number, by what it is for.

    Attributes:
        weight: weights and activations.
        gradient: the gradient buffer.
        optimizer: what the optimizer keeps, main weights included.
    """

    weight: float = 2
    gradient: float = 4
    optimizer: float = 12


@dataclass(frozen=True)
class Recompute:
    """What is computed again in the backward instead of being kept.

    Attributes:
        modules: parts that are recomputed in every layer ("core_attn", "mlp", "moe", "moe_act",
            "shared_experts", "layernorm", "mla_up_proj").
        full_share: share of the layers that are recomputed whole, keeping only their input.
        group: layers recomputed together, of which only the first one's input is kept.
    """

    modules: frozenset[str] = frozenset()
    full_share: float = 0.0
    group: int = 1


@dataclass(frozen=True)
class Setup:
    """Everything about a run that is not the model.

    Attributes:
        tensor_parallel: ranks that share each matrix.
        context_parallel: ranks that share each sequence.
        expert_parallel: ranks that share the experts of a layer.
        expert_tensor_parallel: ranks that share each expert.
        data_parallel: copies of the model.
        sequence_parallel: whether norms and dropout are split over the tensor-parallel ranks.
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a micro-batch.
        num_microbatches: micro-batches of an iteration on one data-parallel rank.
        precision: bytes of a number.
        distributed_optimizer: whether optimizer state is split over data-parallel ranks.
        recompute: what is computed again.
        dropout: whether hidden states are dropped out, which keeps a mask.
        fused_attention: whether the core keeps no seq_length x seq_length scores.
    """

    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    data_parallel: int = 1
    sequence_parallel: bool = False
    seq_length: int = 4096
    micro_batch_size: int = 1
    num_microbatches: int = 1
    precision: Precision = field(default_factory=Precision)
    distributed_optimizer: bool = False
    recompute: Recompute = field(default_factory=Recompute)
    dropout: bool = False
    fused_attention: bool = True

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch_size * self.seq_length / self.context_parallel

    @property
    def expert_data_parallel(self) -> float:
        """Copies of every expert."""
        ranks = self.data_parallel * self.context_parallel * self.tensor_parallel
        return ranks / (self.expert_parallel * self.expert_tensor_parallel)

    def split(self, shard: Shard) -> int:
        """Ranks over which parameters of a kind are split."""
        return {
            "tensor": self.tensor_parallel,
            "replicated": 1,
            "expert": self.expert_parallel * self.expert_tensor_parallel,
        }[shard]

    @property
    def residual_split(self) -> int:
        """Ranks over which hidden states between the matrices are split."""
        return self.tensor_parallel if self.sequence_parallel else 1

    def state_bytes(self, parameters: dict[Shard, int]) -> int:
        """Weights, gradients and optimizer state of parameters on one rank."""
        total = 0.0
        for shard, number in parameters.items():
            copies: float = self.data_parallel * self.context_parallel
            if shard == "expert":
                copies = self.expert_data_parallel
            kept = self.precision.optimizer / (copies if self.distributed_optimizer else 1)
            each = self.precision.weight + self.precision.gradient + kept
            total += number / self.split(shard) * each
        return round(total)


@dataclass(frozen=True)
class Device:
    """How fast one rank is: an operation takes the longer of computing and of moving its bytes.

    Attributes:
        flops_per_ms: FLOPs that matrix products reach.
        bytes_per_ms: bytes to and from memory.
    """

    flops_per_ms: float
    bytes_per_ms: float

    @classmethod
    def of(cls, tflops: float, flops_per_byte: float) -> Device:
        """A device by the TFLOP/s it reaches and the FLOPs it does while it moves one byte."""
        return cls(tflops * 1e9, tflops * 1e9 / flops_per_byte)

    def ms(self, flops: float, moved_bytes: float) -> float:
        """Time of one operation."""
        return max(flops / self.flops_per_ms, moved_bytes / self.bytes_per_ms)

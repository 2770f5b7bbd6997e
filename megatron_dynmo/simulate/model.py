"""The transformer that the scenarios change: FLOPs and bytes of one dense layer."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.trace import CostTrace

__all__ = ["TransformerModel"]

type Array = NDArray[np.float64]


@dataclass(frozen=True)
class TransformerModel:
    """A dense GPT, whose shares of time are shares of FLOPs.

    With hidden size h and sequence length s a token costs 8h^2 FLOPs in the four projections of
    attention, 4sh in its core and 16h^2 in an MLP of width 4h; the output layer costs it 2h for
    each word of the vocabulary.

    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters using
    Megatron-LM, arXiv 2104.04473, appendix; activations: Korthikanti et al., arXiv 2205.05198,
    34sbh bytes with the core of attention recomputed.

    Attributes:
        num_layers: transformer layers.
        hidden: hidden size.
        seq_length: tokens of one sample; a micro-batch is one sample.
        vocab_size: words; 0 for no embedding and no output layer.
        forward_ms: forward of one micro-batch through one dense layer.
        backward_ratio: backward time over forward time.
        bytes_per_parameter: parameters, gradients and optimizer state (mixed-precision Adam: 18).

    Raises:
        ConfigError: a value that no model can have.
    """

    num_layers: int
    hidden: int = 2048
    seq_length: int = 2048
    vocab_size: int = 51_200
    forward_ms: float = 10.0
    backward_ratio: float = 2.0
    bytes_per_parameter: float = 18.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "vocab_size" else 1 if isinstance(value, int) else 1e-9
            if not value >= least or not np.isfinite(value):
                raise ConfigError(f"{field.name} is {value}: at least {least:g} is needed")

    @property
    def core_share(self) -> float:
        """Share of a layer's time in the core of attention, which grows with the sequence."""
        return 4 * self.seq_length / self._flops

    @property
    def mlp_share(self) -> float:
        """Share of a layer's time in the MLP."""
        return 16 * self.hidden / self._flops

    @property
    def key_value_share(self) -> float:
        """Share of a layer's time in the key and value projections."""
        return 4 * self.hidden / self._flops

    @property
    def layer_bytes(self) -> float:
        """Parameters, gradients and optimizer state of one layer."""
        return 12 * self.hidden**2 * self.bytes_per_parameter

    def trace(
        self,
        forward_factor: Array,
        backward_factor: Array | None = None,
        memory_factor: Array | None = None,
        announced: tuple[int, ...] = (),
    ) -> CostTrace:
        """Make a trace from what a dynamic leaves of each layer.

        Args:
            forward_factor: [iterations, layers], share of the dense forward time.
            backward_factor: the same for the backward; equal to the forward's if None.
            memory_factor: the same for memory; 1 if None.
            announced: see `CostTrace`.
        """
        num_iterations, num_layers = forward_factor.shape
        backward = forward_factor if backward_factor is None else backward_factor
        memory = np.ones((1, num_layers)) if memory_factor is None else memory_factor
        output_ms = self.forward_ms * 2 * self.vocab_size / self._flops
        extra = np.broadcast_to([0.0, output_ms], (num_iterations, 2))
        embedding_bytes = self.vocab_size * self.hidden * self.bytes_per_parameter
        return CostTrace(
            forward_ms=self.forward_ms * forward_factor,
            backward_ms=self.forward_ms * self.backward_ratio * backward,
            memory_bytes=np.broadcast_to(self.layer_bytes * memory, forward_factor.shape),
            activation_bytes=np.full(num_layers, 34.0 * self.seq_length * self.hidden),
            parameters=np.full(num_layers, 12.0 * self.hidden**2),
            extra_forward_ms=extra,
            extra_backward_ms=extra * self.backward_ratio,
            extra_memory_bytes=(embedding_bytes, embedding_bytes),
            announced=announced,
        )

    @property
    def _flops(self) -> float:
        """FLOPs of a token in a layer, over h."""
        return 24 * self.hidden + 4 * self.seq_length

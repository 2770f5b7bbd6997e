"""Bytes that one rank keeps for the backward, for each micro-batch in flight.

The counts follow what Megatron's modules save: inputs of matrix products and norms, queries, keys,
values and output of the attention's core, both sides of the activation function.

Source: Korthikanti et al., Reducing activation recomputation in large transformer models,
arXiv 2205.05198, section 4, without the scores that a fused core does not keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dynmo.planner.layers import Layer, MoeMlp
from megatron_dynmo.planner.model import Model, split_parameters
from megatron_dynmo.planner.setup import Setup

__all__ = ["Memory"]

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, of states and of activations.

    Attributes:
        model: the model.
        setup: how it is trained.
    """

    model: Model
    setup: Setup

    # ---------------------------------------------------------------- states

    def layer_states(self, layer: Layer) -> int:
        """Weights, gradients and optimizer state of a layer."""
        return self.setup.state_bytes(self.model.parameters_of(layer))

    def first_states(self) -> int:
        """Those of the embedding."""
        positions = self.model.learned_positions * self.model.hidden
        words = self.model.embedding - positions
        return self.setup.state_bytes({"tensor": words, "replicated": positions})

    def last_states(self, num_stages: int) -> int:
        """Those of final norm, output layer and MTP, and of a copy of the embedding if needed."""
        words = self.model.output.num_parameters
        copies = 0 if self.model.tied and num_stages == 1 else 1
        # MTP embeds its tokens on the last stage; tied weights serve both ends there.
        if self.model.mtp_layers and num_stages > 1 and not self.model.tied:
            copies += 1
        states = self.setup.state_bytes(
            {"tensor": copies * words, "replicated": self.model.final_norm}
        )
        sets = min(self.model.mtp_layers, 1) if self.model.mtp_shared else self.model.mtp_layers
        mtp = split_parameters(self.model.mtp_matrices, self.model.mtp_vectors)
        return states + sets * self.setup.state_bytes(mtp)

    # ---------------------------------------------------------------- activations

    def layer_activations(self, layer: Layer) -> int:
        """Kept by a layer, after recompute."""
        share = self.setup.recompute.full_share
        kept = (1 - share) * self._kept(layer)
        return round(kept + share * self._input() / self.setup.recompute.group)

    def first_activations(self) -> int:
        """Kept by the embedding: token numbers, and the mask of its dropout."""
        mask = self.model.hidden / self.setup.residual_split if self.setup.dropout else 0
        return round(self.setup.tokens * (8 + mask))

    def last_activations(self) -> int:
        """Kept by final norm, output layer and loss, and by MTP with its own."""
        hidden = 2 * self.model.hidden * self.setup.precision.weight / self.setup.residual_split
        logits = _FLOAT32_BYTES * self.model.vocab_size / self.setup.tensor_parallel
        end = self.setup.tokens * (hidden + logits)
        if not self.model.mtp_layers:
            return round(end)
        join = 5 * self.setup.tokens * self.model.hidden * self.setup.precision.weight
        each = end + join / self.setup.residual_split
        each += self.layer_activations(self.model.layers[-1])
        return round(end + self.model.mtp_layers * each)

    def transient(self) -> int:
        """Most that recomputing needs for a moment on top of what is kept."""
        recompute = self.setup.recompute
        if recompute.full_share == 0:
            return 0
        return round(recompute.group * max(self._kept(layer) for layer in self.model.layers))

    def _input(self) -> float:
        split = self.setup.residual_split
        return self.setup.tokens * self.model.hidden * self.setup.precision.weight / split

    def _kept(self, layer: Layer) -> float:
        """Bytes that a layer keeps when it is not recomputed whole."""
        setup, hidden = self.setup, self.model.hidden
        weight, skipped = setup.precision.weight, setup.recompute.modules
        # Norms read their input, matrices the norm's output, twice each.
        streams = 2 + (0 if "layernorm" in skipped else 2)
        residual = streams * hidden * weight
        if setup.dropout:
            residual += 2 * hidden
        inner = self._attention(layer)
        if isinstance(layer.mlp, MoeMlp):
            inner += self._moe(layer.mlp)
        elif "mlp" not in skipped:
            inner += self._feed_forward(layer.mlp.ffn, layer.mlp.gated)
        per_token = residual / setup.residual_split + inner / setup.tensor_parallel
        return setup.tokens * per_token

    def _attention(self, layer: Layer) -> float:
        """Bytes of one token, over all tensor-parallel ranks."""
        setup, attention = self.setup, layer.attention
        kept = attention.kept_width * setup.precision.weight
        if "mla_up_proj" in setup.recompute.modules:
            kept -= attention.query_width * setup.precision.weight
        if setup.fused_attention:
            return kept + _FLOAT32_BYTES * attention.num_heads
        if "core_attn" in setup.recompute.modules:
            return kept
        # Softmax and its dropped-out copy, and the mask.
        scores = setup.seq_length * attention.num_heads
        return kept + scores * (2 * setup.precision.weight + 1)

    def _feed_forward(self, ffn: int, gated: bool, *, act: bool = True) -> float:
        """Bytes of one token: both sides of the activation function, or the input side alone."""
        return ((2 if gated else 1) + act) * ffn * self.setup.precision.weight

    def _moe(self, mlp: MoeMlp) -> float:
        """Bytes of one token: logits, its copies at the experts, their inner widths."""
        skipped, hidden = self.setup.recompute.modules, self.model.hidden
        if "moe" in skipped:
            return 0.0
        act = "moe_act" not in skipped
        width = hidden if mlp.latent is None else mlp.latent
        kept = 2 * mlp.top_k * width * self.setup.precision.weight
        kept += _FLOAT32_BYTES * mlp.num_experts
        kept += self._feed_forward(mlp.top_k * mlp.ffn, mlp.gated, act=act)
        if "shared_experts" not in skipped:
            kept += self._feed_forward(mlp.shared_ffn, mlp.gated)
        return kept

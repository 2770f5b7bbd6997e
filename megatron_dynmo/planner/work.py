"""Time of layers, embedding and output on one rank, from FLOPs and bytes.

A matrix product takes the longer of its FLOPs at the device's speed and its bytes at the memory's;
what lies between the products (norms, residuals, activation functions, routing) only moves bytes.
The backward costs twice the forward, plus what is recomputed. Communication is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dynmo.planner.layers import Layer, Matrix, MoeMlp
from megatron_dynmo.planner.model import Model
from megatron_dynmo.planner.setup import Device, Setup

__all__ = ["Work"]

BACKWARD_OVER_FORWARD = 2.0
# float32 passes over the logits: cast, maximum, exponential, sum; two more for the gradient.
_LOSS_FORWARD_PASSES, _LOSS_BACKWARD_PASSES = 4, 2
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Work:
    """Forward and backward times of a micro-batch on one rank of every stage.

    Attributes:
        model: the model.
        setup: how it is trained.
        device: how fast a rank is.
    """

    model: Model
    setup: Setup
    device: Device

    def layer(self, layer: Layer) -> tuple[float, float]:
        """(forward, backward) of a layer in ms."""
        parts = self._parts(layer)
        forward = sum(parts.values())
        recompute = self.setup.recompute
        again = recompute.full_share * forward
        again += (1 - recompute.full_share) * sum(
            ms for name, ms in parts.items() if name in recompute.modules
        )
        return forward, BACKWARD_OVER_FORWARD * forward + again

    def embedding(self) -> tuple[float, float]:
        """(forward, backward) of the embedding in ms: one row read and written for each token."""
        forward = self._move(2 * self.model.hidden)
        return forward, BACKWARD_OVER_FORWARD * forward

    def output(self) -> tuple[float, float]:
        """(forward, backward) of final norm, output layer and loss in ms."""
        logits = self.setup.tokens * self.model.vocab_size / self.setup.tensor_parallel
        product = self._product(self.model.output) + self._residual(2 * self.model.hidden)
        loss = [
            self.device.ms(0, passes * _FLOAT32_BYTES * logits)
            for passes in (_LOSS_FORWARD_PASSES, _LOSS_BACKWARD_PASSES)
        ]
        return product + loss[0], BACKWARD_OVER_FORWARD * product + loss[1]

    def mtp(self) -> tuple[float, float]:
        """(forward, backward) of all MTP layers in ms, embedding and output layer included."""
        join = Matrix(2 * self.model.hidden, self.model.hidden)
        forward = self._product(join) + self._residual(6 * self.model.hidden)
        parts = [
            self.embedding(), self.layer(self.model.layers[-1]), self.output(),
            (forward, BACKWARD_OVER_FORWARD * forward),
        ]  # fmt: skip
        number = self.model.mtp_layers
        return number * sum(f for f, _ in parts), number * sum(b for _, b in parts)

    def layer_flops(self, layer: Layer) -> float:
        """FLOPs of a micro-batch in a layer's forward, over all tensor-parallel ranks."""
        matrices = sum(one.flops for one in layer.matrices(self.model.hidden))
        core = layer.attention.core_flops(self.setup.seq_length)
        return self.setup.tokens * (matrices + core)

    # ---------------------------------------------------------------- parts of a layer

    def _parts(self, layer: Layer) -> dict[str, float]:
        """Forward times in ms, by the names that --recompute-modules uses; others under "rest"."""
        hidden = self.model.hidden
        attention = [self._product(one) for one in layer.attention.matrices(hidden)]
        rotary = self._move(2 * layer.attention.kept_width / self.setup.tensor_parallel)
        parts = {
            "core_attn": self._core(layer),
            "layernorm": self._residual(4 * hidden),
            "rest": sum(attention) + rotary + self._residual(6 * hidden),
        }
        if not isinstance(layer.mlp, MoeMlp):
            products = [self._product(one) for one in layer.mlp.matrices(hidden)]
            return parts | {"mlp": sum(products) + self._activation(layer.mlp.ffn, layer.mlp.gated)}
        return parts | self._moe_parts(layer.mlp)

    def _moe_parts(self, mlp: MoeMlp) -> dict[str, float]:
        """As `_parts`, of an MoE block; what moe_act and shared_experts recompute is apart."""
        hidden = self.model.hidden
        routed, shared = mlp.matrices(hidden), []
        if mlp.shared_ffn:
            end = len(routed) - mlp.shared_gate
            shared = routed[end - 2 : end]
            routed = [one for at, one in enumerate(routed) if not end - 2 <= at < end]
        # Tokens are copied to their experts and back, and so are the gradients.
        routing = self._move(4 * mlp.top_k * hidden / self.setup.tensor_parallel)
        act = self._activation(mlp.top_k * mlp.ffn, mlp.gated)
        parts = {
            "moe": sum(self._product(one) for one in routed) + routing,
            "moe_act": act,
            "shared_experts": sum(self._product(one) for one in shared)
            + self._activation(mlp.shared_ffn, mlp.gated),
        }
        if "moe" in self.setup.recompute.modules:
            return {"moe": sum(parts.values())}
        return parts

    def _core(self, layer: Layer) -> float:
        setup, attention = self.setup, layer.attention
        flops = setup.tokens * attention.core_flops(setup.seq_length) / setup.tensor_parallel
        moved = setup.tokens * attention.kept_width * setup.precision.weight
        if not setup.fused_attention:
            # Scores are written and read twice: by the softmax and by the weighted sum.
            scores = setup.tokens * setup.seq_length * attention.num_heads
            moved += 4 * scores * setup.precision.weight
        return self.device.ms(flops, moved / setup.tensor_parallel)

    def _product(self, matrix: Matrix) -> float:
        """One matrix product of a micro-batch."""
        setup = self.setup
        # Experts are dealt over ranks, but every rank sends as many tokens as it takes in.
        split = setup.residual_split if matrix.shard == "replicated" else setup.tensor_parallel
        tokens = setup.tokens / split
        weights = matrix.num_parameters / setup.split(matrix.shard)
        passing = tokens * matrix.active * (matrix.rows + matrix.columns)
        moved = (weights + passing) * setup.precision.weight
        return self.device.ms(tokens * matrix.flops, moved)

    def _activation(self, ffn: int, gated: bool) -> float:
        """Activation function of an inner width: read one or two, write one."""
        return self._move((3 if gated else 2) * ffn / self.setup.tensor_parallel)

    def _residual(self, numbers: float) -> float:
        """Numbers of each token moved between the matrices."""
        return self._move(numbers / self.setup.residual_split)

    def _move(self, numbers: float) -> float:
        """Numbers of each token read or written, in ms."""
        return self.device.ms(0, self.setup.tokens * numbers * self.setup.precision.weight)

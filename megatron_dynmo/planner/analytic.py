"""Costs of a model that nobody has run yet, with every assumption behind them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.planner.layers import MoeMlp
from megatron_dynmo.planner.memory import Memory
from megatron_dynmo.planner.model import Model
from megatron_dynmo.planner.setup import Device, Setup
from megatron_dynmo.planner.work import Work

__all__ = ["DEFAULT_FLOPS_PER_BYTE", "AnalyticCosts", "analytic_costs", "assumptions"]

DEFAULT_FLOPS_PER_BYTE = 300.0
_TFLOPS_OF_RELATIVE_UNITS = 1.0


@dataclass(frozen=True)
class AnalyticCosts:
    """Modelled costs and what they rest on.

    Attributes:
        costs: as measured ones; times in `unit`.
        transient_bytes: what recomputing needs on every rank on top of the stages' memory.
        unit: "ms", or "relative": the forward of the average decoder layer takes 1.
        output_share: share of the last stage's extra that is output layer and loss, not MTP.
    """

    costs: ModelCosts
    transient_bytes: int
    unit: str
    output_share: float


def analytic_costs(
    model: Model,
    setup: Setup,
    num_stages: int,
    *,
    tflops: float | None = None,
    flops_per_byte: float = DEFAULT_FLOPS_PER_BYTE,
    p2p_ms: float = 0.0,
) -> AnalyticCosts:
    """Model the costs of layers, embedding and output from FLOPs and bytes.

    Args:
        model: the model.
        setup: how it is trained.
        num_stages: pipeline-parallel size.
        tflops: TFLOP/s that a rank reaches in matrix products; None for relative units.
        flops_per_byte: FLOPs that a rank does while it moves one byte.
        p2p_ms: one hop between stages.
    """
    device = Device.of(_TFLOPS_OF_RELATIVE_UNITS if tflops is None else tflops, flops_per_byte)
    work, memory = Work(model, setup, device), Memory(model, setup)
    # Layers of a kind cost the same, and a model has few kinds.
    times = {layer: work.layer(layer) for layer in set(model.layers)}
    scale = 1.0
    if tflops is None:
        scale = model.num_layers / sum(times[layer][0] for layer in model.layers)
    states = {layer: memory.layer_states(layer) for layer in times}
    active = {layer: memory.layer_activations(layer) for layer in times}
    layers = tuple(
        LayerCost(
            number,
            times[layer][0] * scale,
            times[layer][1] * scale,
            memory_bytes=states[layer],
            activation_bytes=active[layer],
        )
        for number, layer in enumerate(model.layers, 1)
    )
    output, mtp, embedding = work.output(), work.mtp(), work.embedding()
    first = ExtraCost(
        embedding[0] * scale,
        embedding[1] * scale,
        memory_bytes=memory.first_states(),
        activation_bytes=memory.first_activations(),
    )
    last = ExtraCost(
        (output[0] + mtp[0]) * scale,
        (output[1] + mtp[1]) * scale,
        memory_bytes=memory.last_states(num_stages),
        activation_bytes=memory.last_activations(),
    )
    return AnalyticCosts(
        ModelCosts(layers, first, last, setup.num_microbatches, p2p_ms),
        memory.transient(),
        "relative" if tflops is None else "ms",
        sum(output) / (sum(output) + sum(mtp)),
    )


def assumptions(model: Model, setup: Setup, *, flops_per_byte: float) -> list[str]:
    """What the modelled numbers rest on, one line each."""
    precision = setup.precision
    sharded = " split over data-parallel ranks" if setup.distributed_optimizer else ""
    found = [
        "times: FLOPs at one speed, or bytes if moving them takes longer, with "
        f"{flops_per_byte:g} FLOPs for each byte; backward twice the forward, plus recompute; "
        "no communication, gradient reduction or optimizer step",
        f"memory: {precision.weight:g} + {precision.gradient:g} + {precision.optimizer:g} bytes a "
        f"parameter (weights, gradients, optimizer{sharded}) and the activations in flight; no "
        "fragmentation, workspaces or communication buffers",
        f"{setup.seq_length:,} tokens x {setup.micro_batch_size} a micro-batch, TP "
        f"{setup.tensor_parallel}, CP {setup.context_parallel}, EP {setup.expert_parallel}, DP "
        f"{setup.data_parallel}",
    ]
    if any(isinstance(layer.mlp, MoeMlp) for layer in model.layers):
        found.append("tokens spread evenly over the experts")
    return found

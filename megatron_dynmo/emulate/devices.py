"""What emulated devices cost: layers, edges, links, ranks and moves, in virtual milliseconds.

Pure: no torch, no Megatron. The same object predicts an iteration by closed form, so an emulated
run can be compared with what `cost.predict_iteration_ms` says of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_dynmo.cost import (
    ExtraCost,
    LayerCost,
    ModelCosts,
    predict_iteration_ms,
    stage_costs,
)
from megatron_dynmo.emulate.over_time import Constant, OverTime
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.plan import LayerMove, MigrationPlan

__all__ = ["Emulation", "Link", "MoveCost", "UnitCosts"]

_NOTHING: OverTime = Constant(0.0)
_ONE: OverTime = Constant(1.0)
_BYTES_PER_MS_OF_GB_S = 1e6


@dataclass(frozen=True)
class UnitCosts:
    """One layer, or what the first or the last stage has besides its layers, on a rank of speed 1.

    Attributes:
        forward_ms: forward of one micro-batch.
        backward_ms: backward of one micro-batch, without recomputation, which runs (and is
            charged as) another forward.
        scale: factor on both.
        reduce_ms: gradient reduction that nothing hides, per iteration.
        optimizer_ms: optimizer step, per iteration.
        memory_bytes: what moves with a layer.
    """

    forward_ms: OverTime = _NOTHING
    backward_ms: OverTime = _NOTHING
    scale: OverTime = _ONE
    reduce_ms: OverTime = _NOTHING
    optimizer_ms: OverTime = _NOTHING
    memory_bytes: int = 0

    def forward_at(self, iteration: int) -> float:
        """Forward of one micro-batch in an iteration (1-based), in ms."""
        return self.forward_ms.at(iteration) * self.scale.at(iteration)

    def backward_at(self, iteration: int) -> float:
        """Backward of one micro-batch in an iteration, in ms."""
        return self.backward_ms.at(iteration) * self.scale.at(iteration)


@dataclass(frozen=True)
class Link:
    """The way from one pipeline stage to the next; the sender does not wait.

    Attributes:
        latency_ms: from the end of a pass to the arrival of an empty message.
        bandwidth_gb_s: GB (1e9 bytes) per second; None is no limit.
        message_bytes: what a message counts as; None is its real size.
    """

    latency_ms: float = 0.0
    bandwidth_gb_s: float | None = None
    message_bytes: int | None = None

    def hop_ms(self, num_bytes: int) -> float:
        """From the end of a pass to the arrival of its output of this real size."""
        if self.bandwidth_gb_s is None:
            return self.latency_ms
        size = num_bytes if self.message_bytes is None else self.message_bytes
        return self.latency_ms + size / (self.bandwidth_gb_s * _BYTES_PER_MS_OF_GB_S)


@dataclass(frozen=True)
class MoveCost:
    """What a move is charged at a stated bandwidth.

    Attributes:
        bandwidth_gb_s: of each rank, in and out at once.
        rebuild_ms: everything but the transfer.
    """

    bandwidth_gb_s: float
    rebuild_ms: float


@dataclass(frozen=True)
class Emulation:
    """Devices that exist in virtual time alone.

    Attributes:
        layers: in order, numbered from 1.
        first_stage_extra: embedding.
        last_stage_extra: output layer and loss.
        optimizer_ms: optimizer step of every rank beside its layers, per iteration.
        speeds: relative speed by pp_rank; 1 where none is given.
        link: between stages.
        move_cost: what moving is charged; None is its measured wall time.
    """

    layers: tuple[UnitCosts, ...]
    first_stage_extra: UnitCosts = UnitCosts()
    last_stage_extra: UnitCosts = UnitCosts()
    optimizer_ms: OverTime = _NOTHING
    speeds: Mapping[int, OverTime] = field(default_factory=dict)
    link: Link = Link()
    move_cost: MoveCost | None = None

    def speed(self, pp_rank: int, iteration: int) -> float:
        """Relative speed of a rank in an iteration."""
        return self.speeds[pp_rank].at(iteration) if pp_rank in self.speeds else 1.0

    def costs(self, iteration: int, num_microbatches: int, num_bytes: int = 0) -> ModelCosts:
        """What a profiler of ranks of speed 1 reads in an iteration.

        Args:
            iteration: 1-based.
            num_microbatches: micro-batches of the iteration.
            num_bytes: real size of a message between stages.
        """

        def extra(unit: UnitCosts) -> ExtraCost:
            return ExtraCost(
                forward_ms=unit.forward_at(iteration),
                backward_ms=unit.backward_at(iteration),
                memory_bytes=unit.memory_bytes,
                reduce_ms=unit.reduce_ms.at(iteration),
                optimizer_ms=unit.optimizer_ms.at(iteration),
            )

        layers = tuple(
            LayerCost(
                layer_number=layer_number,
                forward_ms=unit.forward_at(iteration),
                backward_ms=unit.backward_at(iteration),
                memory_bytes=unit.memory_bytes,
                reduce_ms=unit.reduce_ms.at(iteration),
                optimizer_ms=unit.optimizer_ms.at(iteration),
            )
            for layer_number, unit in enumerate(self.layers, 1)
        )
        return ModelCosts(
            layers=layers,
            first_stage_extra=extra(self.first_stage_extra),
            last_stage_extra=extra(self.last_stage_extra),
            num_microbatches=num_microbatches,
            p2p_ms=self.link.hop_ms(num_bytes),
        )

    def predict_ms(
        self, layout: LayerLayout, iteration: int, num_microbatches: int, num_bytes: int = 0
    ) -> float:
        """Closed form of an iteration's time under a layout; arguments as `costs`.

        Raises:
            ConfigError: The layout is of another model, or a schedule that Megatron refuses.
        """
        costs = self.costs(iteration, num_microbatches, num_bytes)
        shape = range(layout.virtual_stages), range(layout.num_stages)
        speeds = [self.speed(pp_rank, iteration) for pp_rank in shape[1]]
        stages = {(s.vp_stage, s.pp_rank): s for s in stage_costs(costs, layout)}

        def chunks(name: str) -> list[list[float]]:
            return [[getattr(stages[v, p], name) / speeds[p] for p in shape[1]] for v in shape[0]]

        def ranks(name: str) -> list[float]:
            return [sum(column) for column in zip(*chunks(name), strict=True)]

        own = self.optimizer_ms.at(iteration)
        return predict_iteration_ms(
            "interleaved" if layout.virtual_stages > 1 else "1f1b",
            chunks("forward_ms"),
            chunks("backward_ms"),
            num_microbatches,
            costs.p2p_ms,
            reduce_ms=ranks("reduce_ms"),
            optimizer_ms=[
                one + own / speed for one, speed in zip(ranks("optimizer_ms"), speeds, strict=True)
            ],
            num_stages=layout.num_stages,
        )

    def move_ms(self, plan: MigrationPlan) -> float:
        """What a move costs at the stated bandwidth: the busiest direction of the busiest rank."""
        assert self.move_cost is not None, "moves are charged at their measured cost"

        def size(moves: tuple[LayerMove, ...]) -> int:
            layers = (move.layer_number for move in moves if not move.is_local)
            return sum(self.layers[layer_number - 1].memory_bytes for layer_number in layers)

        busiest = max(
            max(size(plan.sent_by(pp_rank)), size(plan.received_by(pp_rank)))
            for pp_rank in range(plan.new.num_stages)
        )
        per_ms = self.move_cost.bandwidth_gb_s * _BYTES_PER_MS_OF_GB_S
        return self.move_cost.rebuild_ms + busiest / per_ms

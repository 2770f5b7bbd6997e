"""What a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dynmo.cost import ModelCosts
from megatron_dynmo.errors import ConfigError

__all__ = ["Question"]


@dataclass(frozen=True)
class Question:
    """Costs, the pipeline they are to be laid out on, and what is allowed.

    Attributes:
        costs: the model's costs.
        num_stages: pipeline-parallel size.
        virtual_stages: chunks on each rank.
        min_layers: fewest layers of a chunk.
        memory_cap_bytes: allowed on each rank.
        mtp_layers: MTP layers, which stay with the output layer.
        transient_bytes: memory that every rank needs for a moment besides its stage's.
        output_share: share of the last stage's extra that the output layer with its loss takes.

    Raises:
        ConfigError: a number that makes no sense.
    """

    costs: ModelCosts
    num_stages: int
    virtual_stages: int = 1
    min_layers: int = 1
    memory_cap_bytes: float | None = None
    mtp_layers: int = 0
    transient_bytes: int = 0
    output_share: float = 1.0

    def __post_init__(self) -> None:
        if min(self.num_stages, self.virtual_stages) < 1:
            raise ConfigError(
                f"{self.num_stages} stages x {self.virtual_stages} virtual stages: both must be at "
                "least 1"
            )
        cap = self.memory_cap_bytes
        if cap is not None and cap <= self.transient_bytes:
            needed = f", and {self.transient_bytes:,} are for recomputing alone"
            raise ConfigError(
                f"{cap:,.0f} bytes are allowed on each rank{needed if cap > 0 else ''}: allow more"
            )

    @property
    def total_ms(self) -> float:
        """One micro-batch through the whole model, forward and backward."""
        costs = self.costs
        extras = costs.first_stage_extra.total_ms + costs.last_stage_extra.total_ms
        return sum(layer.total_ms for layer in costs.layers) + extras

    @property
    def mean_ms(self) -> float:
        """One micro-batch on a rank if all ranks had the same."""
        return self.total_ms / self.num_stages

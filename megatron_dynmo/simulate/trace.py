"""What every layer costs in every iteration: the input of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_dynmo.cost import ExtraCost, LayerCost, ModelCosts
from megatron_dynmo.errors import ConfigError

__all__ = ["CostTrace"]

type Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CostTrace:
    """Costs of one micro-batch over the iterations of a run. Arrays are not to be written to.

    Attributes:
        forward_ms: [iterations, layers].
        backward_ms: [iterations, layers].
        memory_bytes: [iterations, layers], parameters, gradients and optimizer state.
        activation_bytes: [layers], kept for each micro-batch in flight.
        parameters: [layers], weights before training; what a split by parameters counts.
        extra_forward_ms: [iterations, 2], of the first stage (embedding) and the last (output).
        extra_backward_ms: [iterations, 2].
        extra_memory_bytes: of the first stage and the last.
        first_iteration: number of the first row.
        announced: rows whose costs are known before they are measured, because the dynamic follows
            a schedule; ascending.

    Raises:
        ConfigError: shapes that do not fit together, or values that cannot be a cost.
    """

    forward_ms: Array
    backward_ms: Array
    memory_bytes: Array
    activation_bytes: Array
    parameters: Array
    extra_forward_ms: Array
    extra_backward_ms: Array
    extra_memory_bytes: tuple[float, float] = (0.0, 0.0)
    first_iteration: int = 1
    announced: tuple[int, ...] = ()
    segment: NDArray[np.intp] = field(init=False, repr=False)
    """[iterations], ascending; two iterations with the same number have the same times."""

    def __post_init__(self) -> None:
        num_iterations, num_layers = _check_shape("forward_ms", self.forward_ms)
        wanted = {
            "backward_ms": (num_iterations, num_layers),
            "memory_bytes": (num_iterations, num_layers),
            "activation_bytes": (num_layers,),
            "parameters": (num_layers,),
            "extra_forward_ms": (num_iterations, 2),
            "extra_backward_ms": (num_iterations, 2),
        }
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise ConfigError(
                    f"{name} has shape {getattr(self, name).shape}, {shape} is needed beside "
                    f"forward_ms of {num_iterations} iterations and {num_layers} layers"
                )
        for name in ("forward_ms", *wanted):
            values = getattr(self, name)
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise ConfigError(f"{name} must hold finite numbers of at least 0")
        object.__setattr__(self, "segment", self._segments())

    @property
    def num_iterations(self) -> int:
        """Iterations of the run."""
        return self.forward_ms.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.forward_ms.shape[1]

    def costs_at(
        self,
        index: int,
        *,
        num_microbatches: int,
        p2p_ms: float = 0.0,
        factors: Array | None = None,
    ) -> ModelCosts:
        """The costs of one iteration in the form that balancers and the trigger take.

        Args:
            index: row of the trace, from 0.
            num_microbatches: micro-batches of an iteration.
            p2p_ms: one hop between stages.
            factors: [layers], what a measurement makes of the times; exact if None.
        """
        forward, backward = self.forward_ms[index], self.backward_ms[index]
        if factors is not None:
            forward, backward = forward * factors, backward * factors
        columns = zip(
            forward.tolist(),
            backward.tolist(),
            self.memory_bytes[index].tolist(),
            self.activation_bytes.tolist(),
            strict=True,
        )
        extras = [
            ExtraCost(
                forward_ms=float(self.extra_forward_ms[index, side]),
                backward_ms=float(self.extra_backward_ms[index, side]),
                memory_bytes=int(self.extra_memory_bytes[side]),
            )
            for side in (0, 1)
        ]
        return ModelCosts(
            layers=tuple(
                LayerCost(number, f, b, int(memory), int(activation))
                for number, (f, b, memory, activation) in enumerate(columns, 1)
            ),
            first_stage_extra=extras[0],
            last_stage_extra=extras[1],
            num_microbatches=num_microbatches,
            p2p_ms=p2p_ms,
        )

    def _segments(self) -> NDArray[np.intp]:
        times = (self.forward_ms, self.backward_ms, self.extra_forward_ms, self.extra_backward_ms)
        changed = np.zeros(self.num_iterations, dtype=np.intp)
        for array in times:
            changed[1:] |= (array[1:] != array[:-1]).any(axis=1)
        return np.cumsum(changed)


def _check_shape(name: str, array: Array) -> tuple[int, int]:
    if array.ndim != 2 or 0 in array.shape:
        raise ConfigError(f"{name} has shape {array.shape}: [iterations, layers] is needed")
    return array.shape

"""When is a layer frozen: by schedule, by gradient norms (AutoFreeze), by plasticity (Egeria).

A rule answers after every step how many layers at the front are to be frozen. It decides from
numbers that all ranks have to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_dynmo.adapters.layer_norms import counted_parameters, gradient_norms, layer_norms
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.freezing.reference import Reference
from megatron_dynmo.dynamics.protocol import Step
from megatron_dynmo.flags.freezing import parse_freeze_schedule


class Rule:
    """Decides how many layers at the front are frozen; every method has a default: no change.

    Args:
        config: the settings.
        num_layers: decoder layers of the model.

    Attributes:
        seen: numbers of the last evaluation, by name, for TensorBoard; the same on all ranks.
    """

    def __init__(self, config: DynMoConfig, num_layers: int) -> None:
        self.config = config
        self.num_layers = num_layers
        self.seen: dict[str, float] = {}

    def decide(self, step: Step, num_frozen: int) -> int:
        """How many layers are to be frozen from now on.

        Collective:
            All ranks of the world.
        """
        return num_frozen

    def shape(self, layer: torch.nn.Module, is_frozen: bool) -> None:
        """Give a layer, just built or just frozen or thawed, what the rule keeps on it."""

    @property
    def adds_to_layers(self) -> bool:
        """Whether some layers hold, and save, what others do not."""
        return False

    def changed(self, step: Step, num_frozen: int) -> None:
        """Take note of another number of frozen layers, after parameters were switched.

        Args:
            step: the step after which that happened.
            num_frozen: how many there are now.
        """

    def state(self) -> Any:
        """What `restore` needs, as JSON values; the same on all ranks."""
        return None

    def restore(self, state: Any) -> None:
        """Take up the state of a checkpoint."""


class Schedule(Rule):
    """As the user says, iteration by iteration."""

    def decide(self, step: Step, num_frozen: int) -> int:
        """See `Rule.decide`; no communication."""
        entries = parse_freeze_schedule(self.config.freeze_schedule)
        due = [last for iteration, last in entries if iteration <= step.iteration]
        return due[-1] if due else 0


class AutoFreeze(Rule):
    """A layer is ripe when its gradient norm changes less than in most of the trained layers.

    With G_l(T) the mean gradient norm of layer l over evaluation interval T, the rate of change is
    |G_l(T-1) - G_l(T)| / G_l(T-1). Layers are frozen from the front as long as theirs lies below
    the given percentile of the rates of all trained layers.

    Source: Liu et al., AutoFreeze: Automatically Freezing Model Blocks to Accelerate Fine-tuning,
    arXiv 2102.01386, section 3.
    """

    def __init__(self, config: DynMoConfig, num_layers: int) -> None:
        super().__init__(config, num_layers)
        self._sums = [0.0] * num_layers
        self._count = 0
        self._before: list[float] | None = None

    def decide(self, step: Step, num_frozen: int) -> int:
        """See `Rule.decide`; one all_reduce a step."""
        # Without a norm the step was skipped; one that is not finite says nothing of the layers.
        if step.grad_norm is not None and math.isfinite(step.grad_norm):
            norms = gradient_norms(step.run.stage, step.run.device)
            share = _clip_share(step.grad_norm, step.run.args.clip_grad)
            self._sums = [
                total + norm / share for total, norm in zip(self._sums, norms, strict=True)
            ]
            self._count += 1
        if step.iteration % self.config.freeze_interval or not self._count:
            return num_frozen
        now = [total / self._count for total in self._sums]
        before, self._before = self._before, now
        self._sums, self._count = [0.0] * self.num_layers, 0
        return num_frozen if before is None else self._ripe(before, now, num_frozen)

    def _ripe(self, before: Sequence[float], now: Sequence[float], num_frozen: int) -> int:
        """How far from the front rates of change lie below the percentile."""
        rates = [
            abs(old - new) / old if old > 0 else float("inf")
            for old, new in zip(before[num_frozen:], now[num_frozen:], strict=True)
        ]
        if not rates:
            return num_frozen
        limit = float(np.quantile(rates, self.config.freeze_percentile, method="lower"))
        numbered = enumerate(rates, num_frozen + 1)
        self.seen = {f"rate/layer_{number}": rate for number, rate in numbered}
        self.seen["rate_limit"] = limit
        last = self.num_layers - self.config.freeze_keep
        while num_frozen < last and rates and rates.pop(0) < limit:
            num_frozen += 1
        return num_frozen

    def changed(self, step: Step, num_frozen: int) -> None:
        """Frozen layers have no gradient norm; those of the others are still comparable."""

    def state(self) -> Any:
        """See `Rule.state`."""
        return {"sums": self._sums, "count": self._count, "before": self._before}

    def restore(self, state: Any) -> None:
        """See `Rule.restore`."""
        self._sums, self._count, self._before = state["sums"], state["count"], state["before"]


def _clip_share(norm: float, limit: float) -> float:
    """By what factor Megatron has scaled the gradients down to clip them."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


class Egeria(Rule):
    """A layer is ripe when its plasticity has settled; all thaw when the learning rate drops.

    Plasticity is how far a layer's weights moved since the last evaluation, over their norm. It is
    ripe when the slope of a line through its last values, over their mean, is small. Plasticity is
    taken from weights, not from activations of a probe batch: that needs no second forward pass of
    a second model through the pipeline, no batch that all stages see, and the answer does not
    depend on where a layer lives. The snapshot to compare with lies on the layer.

    Source: Wang et al., Egeria: Efficient DNN Training with Knowledge-Guided Layer Freezing,
    EuroSys 2023, sections 4.2 and 4.3 (there plasticity is the distance of activations to those of
    a quantized reference model).
    """

    def __init__(self, config: DynMoConfig, num_layers: int) -> None:
        super().__init__(config, num_layers)
        self._history: list[list[float]] = [[] for _ in range(num_layers)]
        self._has_references = False
        self._rate_at_freeze: float | None = None

    @property
    def adds_to_layers(self) -> bool:
        """Trained layers hold a snapshot, frozen ones do not."""
        return self._has_references

    def decide(self, step: Step, num_frozen: int) -> int:
        """See `Rule.decide`; one all_reduce an evaluation."""
        rate = learning_rate(step.run.optimizer)
        frozen_at = self._rate_at_freeze
        if num_frozen and frozen_at and rate <= self.config.freeze_thaw_ratio * frozen_at:
            return 0
        if step.iteration % self.config.freeze_interval:
            return num_frozen
        if self._has_references:
            for history, value in zip(self._history, self._plasticity(step), strict=True):
                history.append(value)
                del history[: -self.config.freeze_window]
            self.seen = self._numbers(num_frozen)
        with step.run.stage.settled():
            for number, layer in step.run.stage.layers().items():
                if number > num_frozen:
                    Reference.attach(layer).take(layer)
        self._has_references = True
        last = self.num_layers - self.config.freeze_keep
        while num_frozen < last and self._is_settled(self._history[num_frozen]):
            num_frozen += 1
        return num_frozen

    def _plasticity(self, step: Step) -> list[float]:
        """Distance of every layer's weights to its snapshot, over the norm of the snapshot."""
        stage, device = step.run.stage, step.run.device

        def moved(layer: torch.nn.Module) -> list[torch.Tensor]:
            return [
                param.detach().float() - part.float()
                for param, part, is_counted in _compared(layer)
                if is_counted
            ]

        def reference(layer: torch.nn.Module) -> list[torch.Tensor]:
            return [part for _, part, is_counted in _compared(layer) if is_counted]

        with stage.settled():
            distances = layer_norms(stage, device, moved)
        sizes = layer_norms(stage, device, reference)
        return [
            distance / size if size > 0 else 0.0
            for distance, size in zip(distances, sizes, strict=True)
        ]

    def _numbers(self, num_frozen: int) -> dict[str, float]:
        """Plasticity of the trained layers and, over a full window, what its slope is over it."""
        found = {}
        for number, history in enumerate(self._history[num_frozen:], num_frozen + 1):
            found[f"plasticity/layer_{number}"] = history[-1]
            if (slope := self._slope_over_mean(history)) is not None:
                found[f"slope/layer_{number}"] = slope
        return found

    def _is_settled(self, history: Sequence[float]) -> bool:
        """Whether the last values lie on a line that is nearly level."""
        slope = self._slope_over_mean(history)
        return slope is not None and slope <= self.config.freeze_tolerance

    def _slope_over_mean(self, history: Sequence[float]) -> float | None:
        """How steep the line through the last values is, for their size; None before it is known.

        Weights that have not moved at all say nothing: steps may have been skipped, or the learning
        rate is still 0.
        """
        if len(history) < self.config.freeze_window or min(history) == 0:
            return None
        mean = sum(history) / len(history)
        centre = (len(history) - 1) / 2
        slope = sum((x - centre) * (y - mean) for x, y in enumerate(history)) / sum(
            (x - centre) ** 2 for x in range(len(history))
        )
        return abs(slope) / mean

    def shape(self, layer: torch.nn.Module, is_frozen: bool) -> None:
        """A trained layer holds a snapshot, as soon as there are any."""
        if is_frozen:
            Reference.drop(layer)
        elif self._has_references:
            Reference.attach(layer)

    def changed(self, step: Step, num_frozen: int) -> None:
        """Thawed layers begin anew, from a snapshot of this moment."""
        rate = learning_rate(step.run.optimizer)
        self._rate_at_freeze = rate if num_frozen else None
        with step.run.stage.settled():
            for number, layer in step.run.stage.layers().items():
                held = Reference.of(layer)
                if number > num_frozen and held is not None:
                    held.take(layer)
        self._history = [
            history if number > num_frozen > 0 else []
            for number, history in enumerate(self._history, start=1)
        ]

    def state(self) -> Any:
        """See `Rule.state`."""
        return {
            "history": self._history,
            "has_references": self._has_references,
            "rate_at_freeze": self._rate_at_freeze,
        }

    def restore(self, state: Any) -> None:
        """See `Rule.restore`."""
        self._history = state["history"]
        self._has_references = state["has_references"]
        self._rate_at_freeze = state["rate_at_freeze"]


def _compared(layer: torch.nn.Module) -> list[tuple[torch.nn.Parameter, torch.Tensor, bool]]:
    """A layer's parameters, each with its snapshot and whether this rank counts it."""
    held = Reference.of(layer)
    if held is None:
        return []
    return list(zip(layer.parameters(), held.parts(layer), counted_parameters(layer), strict=True))


def learning_rate(optimizer: Any) -> float:
    """The learning rate of the next step, of the groups that follow the schedule as it is."""
    groups = optimizer.param_groups
    return float(next((g["lr"] for g in groups if g.get("default_config")), groups[0]["lr"]))


RULES: dict[str, type[Rule]] = {"schedule": Schedule, "autofreeze": AutoFreeze, "egeria": Egeria}

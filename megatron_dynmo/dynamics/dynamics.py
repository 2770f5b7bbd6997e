"""All dynamics of a run as one: builds their layers, runs them after a step, keeps their state."""

from __future__ import annotations

import dataclasses
import importlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import orjson
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from megatron_dynmo.adapters.checkpoint import DYNAMICS, LAYERS_APART, WATCHING
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.protocol import Dynamic, LayerFactors, Step
from megatron_dynmo.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Change:
    """What one dynamic did after a step.

    Attributes:
        kind: of the dynamic.
        what: fields of its `dynamics` event.
    """

    kind: str
    what: dict[str, Any]


def kinds_of(config: DynMoConfig) -> list[type[Dynamic]]:
    """The classes of the dynamics that the settings ask for, in their fixed order."""
    return [
        importlib.import_module(f"megatron_dynmo.dynamics.{kind}.dynamic").DYNAMIC
        for kind in config.dynamics
    ]


def require_supported(config: DynMoConfig, args: Namespace) -> None:
    """Refuse dynamics that cannot work in this run.

    Raises:
        ConfigError: Every reason, with what to change.
    """
    reasons = [
        f"{kind.kind}: {reason}"
        for kind in kinds_of(config)
        for reason in kind.refusals(config, args)
    ]
    if reasons:
        raise ConfigError("; ".join(reasons))


class Dynamics:
    """The dynamics of a run.

    Args:
        config: the settings.
        args: Megatron's arguments, validated; a checkpoint's state lies in them when there is one.

    Raises:
        ConfigError: The checkpoint's state does not fit.
    """

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        self._args = args
        self._kinds: list[Dynamic] = [kind(config, args) for kind in kinds_of(config)]
        self._classes: dict[type, type] = {}
        self.restore()

    def __iter__(self) -> Iterator[Dynamic]:
        """Each dynamic, in the fixed order."""
        return iter(self._kinds)

    def wrap_block(self, submodules: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
        """A block's specs with layers that the dynamics shape and run."""
        if not submodules.layer_specs:
            return submodules
        return dataclasses.replace(
            submodules, layer_specs=[self.wrap(spec) for spec in submodules.layer_specs]
        )

    def wrap(self, spec: ModuleSpec) -> ModuleSpec:
        """A layer's spec whose module is the same layer, shaped and run by the dynamics."""
        module = spec.module
        if not isinstance(module, type) or not issubclass(module, BaseTransformerLayer):
            raise ConfigError(
                f"{module} is no transformer layer, so {self._names} cannot be used with it"
            )
        if getattr(module, "dynmo_dynamics", None) is self:
            return spec
        if module not in self._classes:
            self._classes[module] = self._subclass(module)
        return dataclasses.replace(spec, module=self._classes[module])

    def _subclass(self, base: type) -> type:
        dynamics = self

        class Layer(base):
            dynmo_dynamics = dynamics

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                # The innermost first: an outer kind (freezing) sees what the others have added.
                for kind in reversed(dynamics._kinds):
                    kind.shape(self)
                dynamics.tell_checkpoints(self.config)

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return dynamics.forward(self, super().forward, *args, **kwargs)

        Layer.__name__ = base.__name__
        Layer.__qualname__ = base.__qualname__
        Layer.__module__ = base.__module__
        return Layer

    def tell_checkpoints(self, config: Any) -> None:
        """Have a block of layers saved layer by layer if a dynamic makes them unlike."""
        config.hetereogenous_dist_checkpoint = self._has_unlike_layers or getattr(
            self._args, LAYERS_APART, False
        )

    @property
    def _has_unlike_layers(self) -> bool:
        return any(kind.has_unlike_layers for kind in self._kinds)

    def forward(self, layer: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer through all dynamics, the first kind outermost."""
        for kind in reversed(self._kinds):
            inner = partial(kind.forward, layer, inner)
        return inner(*args, **kwargs)

    def shape_embedding(self, embedding: Any) -> None:
        """Shape the embedding; see `Dynamic.shape_embedding`."""
        for kind in self._kinds:
            kind.shape_embedding(embedding)

    def begin(self, run: Any) -> None:
        """Before the first step; see `Dynamic.begin`.

        Collective:
            All ranks of the world.
        """
        self.attach(run.stage.chunks)
        for kind in self._kinds:
            kind.begin(run)
        self.remember()

    def attach(self, chunks: Sequence[Any]) -> None:
        """Meet the model chunks of this rank; see `Dynamic.attach`."""
        for kind in self._kinds:
            kind.attach(chunks)

    def begin_iteration(self, iteration: int) -> None:
        """Before a step; see `Dynamic.begin_iteration`."""
        for kind in self._kinds:
            kind.begin_iteration(iteration)

    def after_step(self, step: Step) -> list[Change]:
        """Let every dynamic decide; see `Dynamic.after_step`.

        Returns:
            What changed, in order.

        Collective:
            All ranks of the world.
        """
        changes = []
        for kind in self._kinds:
            what = kind.after_step(step)
            if what is not None:
                changes.append(Change(kind.kind, dict(what)))
        # After every step: the first snapshots of a freezing rule are no event.
        for chunk in step.run.stage.chunks:
            self.tell_checkpoints(chunk.block.config)
        self.remember()
        return changes

    def factors(self, layer_number: int) -> LayerFactors:
        """Expected cost of a layer, all dynamics together."""
        forward = backward = 1.0
        for kind in self._kinds:
            one = kind.factors(layer_number)
            forward, backward = forward * one.forward, backward * one.backward
        return LayerFactors(forward, backward)

    def all_factors(self, num_layers: int) -> tuple[LayerFactors, ...]:
        """`factors` of every layer of the model, in order."""
        return tuple(self.factors(number) for number in range(1, num_layers + 1))

    def all_work(self, num_layers: int) -> tuple[LayerFactors, ...]:
        """What is left of the operations of every layer of the model, in order."""
        found = []
        for number in range(1, num_layers + 1):
            parts = [kind.work(number) for kind in self._kinds]
            found.append(
                LayerFactors(
                    math.prod(part.forward for part in parts),
                    math.prod(part.backward for part in parts),
                )
            )
        return tuple(found)

    def counters(self) -> dict[str, float]:
        """Numbers of all dynamics, as `KIND/NAME`."""
        return {
            f"{kind.kind}/{name}": value
            for kind in self._kinds
            for name, value in kind.counters().items()
        }

    def remember(self) -> None:
        """Put the state where checkpoints take it from."""
        states = {kind.kind: kind.state() for kind in self._kinds}
        setattr(self._args, DYNAMICS, orjson.dumps(states).decode())
        setattr(self._args, LAYERS_APART, self._has_unlike_layers)

    def restore(self) -> None:
        """Take the state over that lies in the arguments: a checkpoint's, or that of the run.

        Raises:
            ConfigError: It does not fit.
        """
        text = getattr(self._args, DYNAMICS, None)
        if text is None:
            return
        try:
            states = dict(orjson.loads(text))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"the state of the dynamics in the checkpoint cannot be read: {error}; "
                "resume from an older checkpoint"
            ) from error
        for missing in sorted(states.keys() - {kind.kind for kind in self._kinds} - WATCHING):
            raise ConfigError(
                f"the checkpoint was saved with {missing} in use; give the same flags again"
                + ("" if missing == "pruning" else ", or take only the weights with --finetune")
            )
        for kind in self._kinds:
            if kind.kind in states:
                kind.restore(states[kind.kind])

    @property
    def _names(self) -> str:
        return " and ".join(kind.kind for kind in self._kinds)

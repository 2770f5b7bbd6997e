"""What a dynamic is: the one interface behind which all kinds look alike.

A dynamic changes what layers cost while they train. It never owns a layer: layers are built by
Megatron from their specs, moved by the migrator and saved by Megatron's checkpoints. So that all
three work without knowing the kind,

- what shapes a layer (which layers are frozen, how many neurons are left) is known on every rank
  for all layers and is JSON; it lies in checkpoints, and `shape` applies it to a layer that was
  just built, wherever that happens;
- what a layer holds beyond that is parameters and persistent buffers of the layer itself: they
  travel and are saved with it.

Decisions are taken after a step, on all ranks, from numbers that all of them have.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.errors import ConfigError


class LayerFactors(NamedTuple):
    """How many times as long as the untouched layer a layer's passes are expected to take."""

    forward: float = 1.0
    backward: float = 1.0


@dataclass(frozen=True)
class Step:
    """A training step that has just ended.

    Attributes:
        iteration: its 1-based number.
        run: the `MegatronRun`: model, optimizer, stage (the live layers of this rank), topology.
        grad_norm: Megatron's gradient norm, the same on all ranks; None where it is not computed.
    """

    iteration: int
    run: Any
    grad_norm: float | None


class Dynamic:
    """One kind of change. Every method has a default that changes nothing.

    Args:
        config: the settings.
        args: Megatron's arguments, validated.

    Attributes:
        kind: name of the kind in events, checkpoints and documents.
    """

    kind: ClassVar[str]

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        self.config = config
        self.args = args

    @classmethod
    def refusals(cls, config: DynMoConfig, args: Namespace) -> list[str]:
        """Say under which of the run's features this kind cannot work, and the remedy of each.

        Args:
            config: the settings, other kinds' among them.
            args: Megatron's arguments, parsed but not validated.
        """
        return []

    def shape(self, layer: Any) -> None:
        """Give a layer the form that the present state asks for.

        Called once for each layer that Megatron has just built, for the last kind first, so that a
        kind finds what runs inside of it; before the layer is cast, moved to its device or wrapped:
        at the start, on resume, and where a moved layer arrives, whose tensors are filled in later.
        Draws from no random stream that training uses.

        Args:
            layer: a TransformerLayer with its global `layer_number`; not yet in use.
        """

    def shape_embedding(self, embedding: Any) -> None:
        """The same for the embedding that Megatron has just built, on ranks that have one."""

    def attach(self, chunks: Sequence[Any]) -> None:
        """Meet the model chunks of this rank, built and loaded, whether they are trained or not.

        Args:
            chunks: `ModelChunk`s, in order of virtual stages.
        """

    def begin(self, run: Any) -> None:
        """Meet the model and optimizer before the first step, after `attach`.

        Args:
            run: the `MegatronRun`.

        Collective:
            All ranks of the world, kind after kind in the order of `config.dynamics`.
        """

    def forward(self, layer: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; `inner` runs what Megatron and the other kinds make of it.

        Args:
            layer: the layer.
            inner: takes the arguments of `TransformerLayer.forward`, returns what that does.
            *args: arguments of the layer.
            **kwargs: the same.
        """
        return inner(*args, **kwargs)

    @property
    def has_unlike_layers(self) -> bool:
        """Whether layers now hold or save other tensors than each other.

        Checkpoints then store layer by layer instead of equal tensors of all layers as one. The
        same on all ranks.
        """
        return False

    def begin_iteration(self, iteration: int) -> None:
        """Get ready for a step.

        Args:
            iteration: its 1-based number.
        """

    def after_step(self, step: Step) -> Mapping[str, Any] | None:
        """Decide whether something changes, and change it on this rank's layers.

        Returns:
            What changed, for the `dynamics` event, the same on all ranks; None when nothing did.

        Collective:
            All ranks of the world, kind after kind in the order of `config.dynamics`.
        """
        return None

    def factors(self, layer_number: int) -> LayerFactors:
        """Expected cost of any layer of the model under the present state.

        The same on all ranks. What is measured overrides it.
        """
        return LayerFactors()

    def work(self, layer_number: int) -> LayerFactors:
        """What is left of the operations of a layer's passes; not how long they take.

        The same on all ranks.
        """
        return self.factors(layer_number)

    def counters(self) -> Mapping[str, float]:
        """Numbers for TensorBoard and W&B, by name; the same on all ranks."""
        return {}

    def state(self) -> Any:
        """What `restore` needs, as JSON values; the same on all ranks."""
        return None

    def restore(self, state: Any) -> None:
        """Take up the state of a checkpoint; called before any layer is built.

        Raises:
            ConfigError: The state is damaged or was made under other settings.
        """
        try:
            self.take_up(state)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"the {self.kind} state in the checkpoint is damaged or of another model "
                f"({error!r}); resume with the flags that it was saved with, or from an older "
                "checkpoint"
            ) from error

    def take_up(self, state: Any) -> None:
        """Read what `state` wrote; what does not read as that is answered by `restore`.

        Raises:
            ConfigError: It was made under other settings.
        """

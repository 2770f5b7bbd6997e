"""Gradual pruning: what is removed takes no memory and no message, and where it can, no time.

Removed weights are not masked. Their parameter is replaced by a smaller one of what is left, with
its master copy and moments, so that nothing can come back and everything that follows from a
parameter's size shrinks: gradients, optimizer state, reductions, checkpoints, moves.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.protocol import Dynamic, LayerFactors, Step
from megatron_dynmo.dynamics.pruning.layer_sizes import LayerSizes
from megatron_dynmo.dynamics.pruning.magnitude import MagnitudePruning
from megatron_dynmo.dynamics.pruning.method import PruningMethod, common_refusals
from megatron_dynmo.dynamics.pruning.units import UnitPruning
from megatron_dynmo.errors import ConfigError

_METHODS: dict[str, Callable[[DynMoConfig, Namespace], PruningMethod]] = {
    "magnitude": MagnitudePruning,
    "neuron": UnitPruning,
    "head": UnitPruning,
}


class Pruning(Dynamic):
    """Removes a growing share of the layers' weights while they train.

    Raises:
        ConfigError: The settings do not fit the model.
    """

    kind: ClassVar[str] = "pruning"

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        super().__init__(config, args)
        self._schedule = config.pruning_schedule(int(args.train_iters or 0))
        assert config.prune is not None
        self._method = _METHODS[config.prune](config, args)

    @classmethod
    def refusals(cls, config: DynMoConfig, args: Namespace) -> list[str]:
        """See `Dynamic.refusals`."""
        refused = common_refusals(args)
        steps = (config.prune_begin, config.prune_end, config.prune_every)
        if not args.train_iters and None in steps:
            refused.append(
                "without --train-iters there is no default for when to prune; give "
                "--dynmo-prune-begin, --dynmo-prune-end and --dynmo-prune-every"
            )
        if "freezing" in config.dynamics:
            refused.append(
                "freezing compares layers with what they were, which pruning makes smaller; use "
                "one of --dynmo-prune and --dynmo-freeze"
            )
        if config.prune == "head":
            refused += _head_refusals(config, args)
        return refused

    def begin(self, run: Any) -> None:
        """See `Dynamic.begin`."""
        self._method.begin(run)

    def shape(self, layer: Any) -> None:
        """See `Dynamic.shape`."""
        self._method.shape(layer)

    @property
    def has_unlike_layers(self) -> bool:
        """See `Dynamic.has_unlike_layers`: all would have to be of one size."""
        return self._is_pruned

    def begin_iteration(self, iteration: int) -> None:
        """See `Dynamic.begin_iteration`."""
        self._method.weights_changed()

    def after_step(self, step: Step) -> Mapping[str, Any] | None:
        """See `Dynamic.after_step`."""
        self._method.weights_changed()  # an evaluation may follow
        share = self._schedule.sparsity(step.iteration)
        amount = self._method.due(share)
        if not amount:
            return None

        def change() -> dict[Any, tuple[Any, Any]]:
            replaced = self._method.prune(step.run, amount)
            return {one.new: (one.old, one.cut) for one in replaced}

        step.run.stage.reform(change)
        return {
            "method": self.config.prune,
            "sparsity": self._sparsity,
            "layers": [round(one, 6) for one in self._layer_sparsities],
            **self._method.details(),
        }

    @property
    def _layer_sparsities(self) -> list[float]:
        numbers = range(1, self._method.num_layers + 1)
        return [self._method.sparsity(number) for number in numbers]

    @property
    def _sparsity(self) -> float:
        return sum(self._layer_sparsities) / self._method.num_layers

    @property
    def _is_pruned(self) -> bool:
        return any(self._layer_sparsities)

    def factors(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.factors`."""
        return self._method.factors(layer_number)

    def work(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.work`."""
        return self._method.work(layer_number)

    def counters(self) -> Mapping[str, float]:
        """Sparsity of the model and of each layer."""
        layers = {
            f"sparsity/layer_{number}": value
            for number, value in enumerate(self._layer_sparsities, start=1)
        }
        return {"sparsity": self._sparsity, **layers}

    def state(self) -> Any:
        """See `Dynamic.state`."""
        return {"method": self.config.prune, **self._method.state()}

    def take_up(self, state: Any) -> None:
        """See `Dynamic.take_up`."""
        method = state["method"]
        if method != self.config.prune:
            raise ConfigError(
                f"the checkpoint was pruned by {method}: go on with --dynmo-prune {method}"
            )
        self._method.restore(state)


def _head_refusals(config: DynMoConfig, args: Namespace) -> list[str]:
    refused = []
    groups, tp_size = LayerSizes.groups_of(args), args.tensor_model_parallel_size
    if 0 < groups < tp_size:
        refused.append(
            f"{groups} query groups are shared by {tp_size} tensor-parallel ranks, so that none "
            "can go; use --dynmo-prune neuron"
        )
    if "sparse_attention" in config.dynamics:
        refused.append(
            "sparse attention is made for the heads that a layer has in the beginning; use "
            "--dynmo-prune neuron beside it"
        )
    if getattr(args, "softmax_type", "vanilla") != "vanilla":
        refused.append("--softmax-type keeps a number for each head; leave it out")
    if getattr(args, "attention_output_gate", False):
        refused.append("--attention-output-gate has rows for each head; leave it out")
    return refused


DYNAMIC = Pruning

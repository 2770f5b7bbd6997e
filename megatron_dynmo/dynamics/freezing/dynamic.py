"""Layer freezing from the front: layers that are trained no more cost no more than their forward.

A frozen layer computes no weight gradient and has no gradient buffer, no reduction, no master copy
and no moments. Once everything before it is frozen too it runs without a graph: no activations, no
input gradient, and no gradient crosses the boundary before it.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer

from megatron_dynmo.adapters import support
from megatron_dynmo.adapters.frozen_front import FrozenFront
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.freezing.rules import RULES
from megatron_dynmo.dynamics.protocol import Dynamic, LayerFactors, Step
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.freezing import parse_freeze_schedule

logger = logging.getLogger(__name__)

# Attribute of a parameter that this module froze: what the user froze is never thawed.
_FROZEN = "dynmo_frozen"
_ROUTER_STANDS = "frozen_expert_bias"  # Megatron's own switch, an attribute of a router
_EMBEDDING, _END = 0, -1  # where layers are counted from 1
# A layer's backward is one product for the input gradient and one for the weight gradient.
_INPUT_GRADIENT = 0.5


class Freezing(Dynamic):
    """See the module and docs/dynamics/freezing.md.

    Attributes:
        front: how far from the front no gradient is needed; the patches ask it.
    """

    kind = "freezing"

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        super().__init__(config, args)
        assert config.freeze is not None
        self.front = FrozenFront()
        self._rule = RULES[config.freeze](config, args.num_layers)
        self._has_tied_embedding = not args.untie_embeddings_and_output_weights or bool(
            getattr(args, "mtp_num_layers", None)
        )
        self._num_frozen = 0
        self._released_bytes = 0
        # Optimizer steps of the run, -1 where the optimizer keeps no count by parameter, and how
        # many there were when a thawed unit began anew.
        self._steps: float | None = None
        self._begun: dict[int, float] = {}

    @classmethod
    def refusals(cls, config: DynMoConfig, args: Namespace) -> list[str]:
        """See `Dynamic.refusals`."""
        found = [f"{feature.flag}: {feature.reason}" for feature in support.refusals(args)]
        too_many = [
            last
            for _, last in parse_freeze_schedule(config.freeze_schedule)
            if args.num_layers and last > args.num_layers
        ]
        if too_many:
            found.append(
                f"--dynmo-freeze-schedule freezes layer {max(too_many)} of {args.num_layers}; give "
                f"at most {args.num_layers}"
            )
        if config.thaws and distrib_optimizer.HAVE_APEX_OR_TE:
            found.append(
                "thawed layers begin with fresh moments and need a step count of their own, but "
                "the fused Adam of TransformerEngine or Apex counts for all parameters together; "
                "use --dynmo-freeze-thaw-ratio 0, or a schedule that only ever freezes more"
            )
        expert_tp = getattr(args, "expert_tensor_parallel_size", None)
        if (
            config.freeze == "egeria"
            and args.num_experts
            and expert_tp not in (None, args.tensor_model_parallel_size)
        ):
            found.append(
                f"--expert-tensor-parallel-size {expert_tp}: the reference of a layer is saved by "
                "tensor- and expert-parallel rank, which only tells ranks apart where experts have "
                f"the tensor-parallel size of the rest, {args.tensor_model_parallel_size}; leave "
                "it out or use --dynmo-freeze autofreeze"
            )
        if args.recompute_granularity == "full" and (args.fp8 or args.fp4):
            found.append(
                "TransformerEngine's checkpoint of whole layers needs an input with a gradient, "
                "which a frozen front has not; use --recompute-granularity selective"
            )
        if "quantile_balancing" in (args.moe_router_load_balancing_type or ""):
            found.append(
                "--moe-router-load-balancing-type quantile_balancing: a router's quantiles go on "
                "moving while it is frozen; use aux_loss"
            )
        return found

    @property
    def optimizer_steps(self) -> float | None:
        """Steps of a parameter that was never frozen; None where they are not counted by parameter.

        Torch's Adam does that. None too before the first step.
        """
        counts = self.args.optimizer == "adam" and not distrib_optimizer.HAVE_APEX_OR_TE
        return self._steps if counts and self._steps and self._steps > 0 else None

    @property
    def _freezes_embedding(self) -> bool:
        return self.config.freeze_embedding == "auto" and not self._has_tied_embedding

    def _is_frozen(self, unit: int) -> bool:
        """Whether a layer, or with 0 the embedding, is frozen; what is at the end never is."""
        if unit == _EMBEDDING:
            return self._num_frozen > 0 and self._freezes_embedding
        return 0 < unit <= self._num_frozen

    # ---------------------------------------------------------------- building and running layers

    def shape(self, layer: Any) -> None:
        """See `Dynamic.shape`."""
        is_frozen = self._is_frozen(layer.layer_number)
        _switch(layer, is_frozen)
        self._rule.shape(layer, is_frozen)

    def shape_embedding(self, embedding: Any) -> None:
        """See `Dynamic.shape_embedding`."""
        _switch(embedding, self._is_frozen(_EMBEDDING))

    @property
    def has_unlike_layers(self) -> bool:
        """See `Dynamic.has_unlike_layers`: some layers save less than others."""
        return self._num_frozen > 0 or self._rule.adds_to_layers

    def forward(self, layer: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Dynamic.forward`."""
        if self.front.is_dead(layer.layer_number):
            with torch.no_grad():
                return inner(*args, **kwargs)
        if self.front.has_dead_input(layer.layer_number):
            args, kwargs = _without_input_gradient(layer, args, kwargs)
        return inner(*args, **kwargs)

    # ---------------------------------------------------------------- the run

    def begin(self, run: Any) -> None:
        """Follow the model's chunks, and give every parameter the step count that is its own."""
        self.front.attach(run.stage.chunks)
        self._look_at_front()
        codec = run.stage.codec()
        if self._steps is None or self.args.no_load_optim:
            self._begun = {}
            steps = torch.tensor([codec.steps()], dtype=torch.float64, device=run.device)
            dist.all_reduce(steps, op=dist.ReduceOp.MAX)
            self._steps = float(steps)
        # A checkpoint holds one count, that of the rank which wrote it.
        for unit, params in _units(run.stage):
            for param in params:
                codec.set_steps(param, self._steps - self._begun.get(unit, 0.0))
        if self._has_tied_embedding and self.config.freeze_embedding == "auto":
            logger.info(
                "the output layer shares the embedding's weights, so only layers are frozen: their "
                "input gradients are still needed"
            )

    def begin_iteration(self, iteration: int) -> None:
        """See `Dynamic.begin_iteration`."""
        self.front.begin_iteration()

    def after_step(self, step: Step) -> Mapping[str, Any] | None:
        """See `Dynamic.after_step`."""
        assert self._steps is not None
        if step.grad_norm is not None:  # None: the step was skipped for an overflow
            self._steps = max(0.0, self._steps) + 1
        wanted = self._rule.decide(step, self._num_frozen)
        if wanted == self._num_frozen:
            return None
        self._freeze(step, wanted)
        return {
            "frozen": list(range(1, self._num_frozen + 1)),
            "embedding": self._is_frozen(_EMBEDDING),
            "released_bytes": self._released_bytes,
        }

    def _freeze(self, step: Step, wanted: int) -> None:
        """Freeze exactly so many layers at the front, and what goes with them."""
        run, stage = step.run, step.run.stage
        were_frozen = {unit for unit in range(run.num_layers + 1) if self._is_frozen(unit)}
        self._num_frozen = wanted
        self._look_at_front()

        def change() -> None:
            for unit, params in _units(stage):
                _switch_parameters(params, self._is_frozen(unit))
            for number, layer in stage.layers().items():
                _switch_routers(layer, self._is_frozen(number))
                self._rule.shape(layer, self._is_frozen(number))

        done = stage.reform(change)
        self._rule.changed(step, wanted)
        for unit in range(run.num_layers + 1):
            if self._is_frozen(unit):
                self._begun.pop(unit, None)
            elif unit in were_frozen:
                assert self._steps is not None
                self._begun[unit] = self._steps
        balance = torch.tensor(
            [done.released_bytes - done.made_bytes], dtype=torch.int64, device=run.device
        )
        dist.all_reduce(balance)
        self._released_bytes += int(balance)

    def _look_at_front(self) -> None:
        self.front.depth = self._num_frozen if self._is_frozen(_EMBEDDING) else None

    # ---------------------------------------------------------------- what others see

    def factors(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.factors`."""
        if self.front.is_dead(layer_number):
            return LayerFactors(1.0, 0.0)
        return LayerFactors(1.0, _INPUT_GRADIENT if self._is_frozen(layer_number) else 1.0)

    def counters(self) -> Mapping[str, float]:
        """See `Dynamic.counters`."""
        return {
            "frozen_layers": float(self._num_frozen),
            "released_bytes": float(self._released_bytes),
            **self._rule.seen,
        }

    def state(self) -> Any:
        """See `Dynamic.state`."""
        return {
            "rule": self.config.freeze,
            "num_frozen": self._num_frozen,
            "embedding": self._is_frozen(_EMBEDDING),
            "released_bytes": self._released_bytes,
            "steps": self._steps,
            "begun": {str(unit): steps for unit, steps in self._begun.items()},
            "rule_state": self._rule.state(),
        }

    def take_up(self, state: Any) -> None:
        """See `Dynamic.take_up`."""
        if state["rule"] != self.config.freeze:
            raise ConfigError(
                f"the checkpoint was saved with --dynmo-freeze {state['rule']}, this run has "
                f"--dynmo-freeze {self.config.freeze}; use the former"
            )
        self._num_frozen = int(state["num_frozen"])
        if state["embedding"] != self._is_frozen(_EMBEDDING):
            raise ConfigError(
                f"the embedding was {'' if state['embedding'] else 'not '}frozen when the "
                "checkpoint was saved; use the same --dynmo-freeze-embedding"
            )
        self._released_bytes = int(state["released_bytes"])
        self._steps = state["steps"]
        self._begun = {int(unit): float(steps) for unit, steps in state["begun"].items()}
        self._rule.restore(state["rule_state"])
        self._look_at_front()


DYNAMIC = Freezing


def _units(stage: Any) -> Iterable[tuple[int, list[torch.nn.Parameter]]]:
    """Every parameter of this rank by unit: layers by number, the embedding as 0.

    What is neither, the final norm and the output layer, is never frozen and comes as _END.
    """
    for number, layer in stage.layers().items():
        yield number, list(layer.parameters())
    rest = dict(stage.parameters_outside_layers())
    for unit in (_EMBEDDING, _END):
        found = [
            param
            for name, param in rest.items()
            if name.startswith("embedding.") == (unit == _EMBEDDING)
        ]
        yield unit, found


def _switch(module: torch.nn.Module, is_frozen: bool) -> None:
    _switch_parameters(module.parameters(), is_frozen)
    _switch_routers(module, is_frozen)


def _switch_parameters(params: Iterable[torch.nn.Parameter], is_frozen: bool) -> None:
    """Freeze parameters, or thaw those that were frozen here."""
    for param in params:
        if is_frozen and param.requires_grad:
            param.requires_grad_(False)
            setattr(param, _FROZEN, True)
        elif not is_frozen and getattr(param, _FROZEN, False):
            param.requires_grad_(True)
            delattr(param, _FROZEN)


def _switch_routers(module: torch.nn.Module, is_frozen: bool) -> None:
    """Have the bias by which a router balances its experts stand still while it is frozen."""
    for part in module.modules():
        if hasattr(part, "expert_bias"):
            setattr(part, _ROUTER_STANDS, is_frozen)


def _without_input_gradient(layer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a layer with hidden states that are the beginning of the graph.

    Recomputed parts of a layer are in the graph only where an input requires a gradient.
    """
    needs_one = layer.config.recompute_granularity == "selective" and torch.is_grad_enabled()
    hidden = args[0] if args else kwargs["hidden_states"]
    hidden = hidden.detach().requires_grad_(needs_one)
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}

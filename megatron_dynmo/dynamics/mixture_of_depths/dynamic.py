"""Mixture of Depths: every few layers a router sends only some tokens through a layer.

Router and predictor are modules of the layer, so Megatron trains and saves them and the migrator
moves them. The capacity is a function of the iteration, so nothing else has to be remembered.

Source: Raposo et al., Mixture-of-Depths, arXiv 2404.02258.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynmo.adapters.layer_rng import mix
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.layer_work import WorkShares, is_moe_layer
from megatron_dynmo.dynamics.mixture_of_depths.heads import ChoicePredictor, TokenRouter, seeded
from megatron_dynmo.dynamics.mixture_of_depths.routed_layer import (
    PREDICTOR,
    ROUTER,
    Outcome,
    Rules,
    run_routed,
    token_multiple,
)
from megatron_dynmo.dynamics.mixture_of_depths.token_routing import num_slots
from megatron_dynmo.dynamics.protocol import Dynamic, LayerFactors, Step
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.mixture_of_depths import CapacitySchedule

# Sets the seeds of routers apart from those of other uses of Megatron's --seed.
_SALT = 0x6D6F64
_IS_REFUSED: tuple[tuple[str, Callable[[Namespace], Any], str], ...] = (
    (
        "--context-parallel-size",
        lambda args: args.context_parallel_size > 1,
        "a rank holds a part of each sequence also inside attention, where chosen tokens would be "
        "dealt unevenly; use --context-parallel-size 1",
    ),
    (
        "--multi-latent-attention",
        lambda args: args.multi_latent_attention,
        "it makes its rotary embeddings inside, by place in the shorter sequence; leave it out",
    ),
    (
        "--experimental-attention-variant",
        lambda args: getattr(args, "experimental_attention_variant", None),
        "its attention selects tokens by their place in the whole sequence; leave it out",
    ),
    (
        "--window-size",
        lambda args: getattr(args, "window_size", None),
        "a window would count chosen tokens instead of places; leave it out",
    ),
    (
        "rotary fusion with --micro-batch-size above 1",
        lambda args: (
            args.position_embedding_type != "learned_absolute"
            and args.apply_rope_fusion
            and args.micro_batch_size > 1
        ),
        "the fused kernel takes one table of positions for all samples; use --no-rope-fusion",
    ),
    (
        "--cuda-graph-impl",
        lambda args: getattr(args, "cuda_graph_impl", "none") not in (None, "none"),
        "a captured layer would run on the tokens chosen at its capture; leave it out",
    ),
    (
        "--overlap-moe-expert-parallel-comm",
        lambda args: getattr(args, "overlap_moe_expert_parallel_comm", False),
        "its schedule runs the parts of a layer without the layer, past the router; leave it out",
    ),
    (
        "--tp-comm-overlap",
        lambda args: getattr(args, "tp_comm_overlap", False),
        "its buffers are made for whole sequences; leave it out",
    ),
    (
        "--sft",
        lambda args: getattr(args, "sft", False),
        "packed sequences have no sample of which tokens could be chosen; leave it out",
    ),
    (
        "--sequence-packing-scheduler",
        lambda args: getattr(args, "sequence_packing_scheduler", None),
        "packed sequences have no sample of which tokens could be chosen; leave it out",
    ),
    (
        "--dataloader-inter-document-masking",
        lambda args: getattr(args, "dataloader_inter_document_masking", False),
        "documents of one sequence are masked by their borders, which move when tokens pass by; "
        "leave it out",
    ),
    (
        "--hybrid-layer-pattern",
        lambda args: getattr(args, "hybrid_layer_pattern", None),
        "only transformer layers are routed; leave it out",
    ),
)


class MixtureOfDepths(Dynamic):
    """See the module; one object a run.

    Raises:
        ConfigError: No layer would be routed.
    """

    kind = "mixture_of_depths"

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        super().__init__(config, args)
        self._schedule = CapacitySchedule.parse(config.mod_capacity)
        self._predicts = config.mod_routing == "threshold"
        self._now: float | None = None  # the capacity; until the first iteration begins, by args
        self._announced: float | None = None
        self._tally = _Tally(args.num_layers)
        self._counters: dict[str, float] = {}

    @classmethod
    def refusals(cls, config: DynMoConfig, args: Namespace) -> list[str]:
        """See `Dynamic.refusals`."""
        found = [f"{flag}: {why}" for flag, is_on, why in _IS_REFUSED if is_on(args)]
        if args.num_layers and config.mod_every > args.num_layers:
            found.append(
                f"--dynmo-mod-every {config.mod_every} routes no layer of {args.num_layers}; "
                "use a smaller number"
            )
        if config.mod_routing == "threshold" and getattr(args, "moe_expert_capacity_factor", None):
            found.append(
                "--moe-expert-capacity-factor: in evaluation samples are filled up to one length "
                "with tokens that would take places from others; use --dynmo-mod-routing "
                "expert-choice or leave it out"
            )
        return found

    def is_routed(self, layer_number: int) -> bool:
        """Whether a layer gets only some of the tokens."""
        return layer_number % self.config.mod_every == 0

    def shape(self, layer: Any) -> None:
        """Give a layer its router; the same weights on every rank and under every layout."""
        if layer.is_mtp_layer or not self.is_routed(layer.layer_number):
            return
        hidden_size = layer.config.hidden_size
        generator = seeded(mix(self.args.seed, layer.layer_number, _SALT))
        heads: dict[str, torch.nn.Module] = {
            ROUTER: TokenRouter(hidden_size, generator, learns=self._is_weighted)
        }
        if self._predicts:
            heads[PREDICTOR] = ChoicePredictor(hidden_size, generator)
        for name, head in heads.items():
            layer.add_module(name, head)
            for parameter in head.parameters():
                # Each rank then sees other tokens, and Megatron adds the gradients up.
                parameter.sequence_parallel = layer.config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def has_unlike_layers(self) -> bool:
        """See `Dynamic.has_unlike_layers`: some have a router."""
        return self.config.mod_every > 1

    def forward(self, layer: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer on the chosen tokens."""
        if not hasattr(layer, ROUTER):
            return inner(*args, **kwargs)
        assert len(args) <= 1, "Megatron names all arguments but the hidden states"
        named = {**kwargs, **dict(zip(("hidden_states",), args, strict=False))}
        rules = Rules(
            capacity=self._capacity,
            is_causal=self._predicts and not layer.training,
            is_weighted=self._is_weighted,
            predictor_coeff=self.config.mod_predictor_coeff,
        )
        output, outcome = run_routed(layer, inner, rules, named)
        self._tally.add(layer.layer_number, layer.training, outcome)
        return output

    def begin_iteration(self, iteration: int) -> None:
        """Take up the capacity of an iteration."""
        self._now = self._schedule.at(iteration)

    def after_step(self, step: Step) -> Mapping[str, Any] | None:
        """Count, and say when the next iteration has another capacity."""
        if self._predicts and step.iteration % step.run.log_interval == 0:
            self._counters = self._tally.collect(step.run.device)
        self._now = self._schedule.at(step.iteration + 1)
        if self._capacity == self._announced:
            return None
        self._announced = self._capacity
        return {
            "capacity": self._capacity,
            "routed_layers": [n for n in range(1, self.args.num_layers + 1) if self.is_routed(n)],
            "tokens_per_sequence": self._num_slots,
        }

    def factors(self, layer_number: int) -> LayerFactors:
        """Work of a layer: what it does for each token, and for each pair of tokens."""
        if not self.is_routed(layer_number):
            return LayerFactors()
        share = self._num_slots / self.args.seq_length
        is_moe = is_moe_layer(self.args, layer_number)
        pairs = WorkShares.of_run(self.args, is_moe=is_moe).pairs
        factor = share * (1 - pairs) + share**2 * pairs
        return LayerFactors(factor, factor)

    def counters(self) -> Mapping[str, float]:
        """Capacity; how well predictors foretell, and what share they let through."""
        return {"capacity": self._num_slots / self.args.seq_length, **self._counters}

    def state(self) -> Any:
        """What the modules of the layers depend on."""
        return {
            "every": self.config.mod_every,
            "predicts": self._predicts,
            "weighting": self.config.mod_weighting,
        }

    def take_up(self, state: Any) -> None:
        """See `Dynamic.take_up`."""
        for name, now in self.state().items():
            saved = state.get(name) if isinstance(state, dict) else None
            if saved != now:
                raise ConfigError(
                    f"the checkpoint's layers have other routers: {name} was {saved} and is {now} "
                    "now; give the --dynmo-mod flags that it was saved with"
                )

    @property
    def _is_weighted(self) -> bool:
        return self.config.mod_weighting == "sigmoid"

    @property
    def _capacity(self) -> float:
        if self._now is None:  # evaluation of a checkpoint, before or without any training
            return self._schedule.at(int(getattr(self.args, "iteration", 0)) + 1)
        return self._now

    @property
    def _num_slots(self) -> int:
        return min(
            num_slots(self.args.seq_length, self._capacity, self._multiple), self.args.seq_length
        )

    @property
    def _multiple(self) -> int:
        parts = self.args.tensor_model_parallel_size if self.args.sequence_parallel else 1
        return token_multiple(
            parts, getattr(self.args, "fp8", None) or getattr(self.args, "fp4", None)
        )


class _Tally:
    """Sums over forward passes since the last `collect`, on the device, by layer."""

    _TRAINED = ("predictor_accuracy", "predictor_loss")
    _EVALUATED = "evaluation_share"

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        # By layer_number: (tokens, right, loss) of training, (tokens, chosen) of evaluation.
        self._training: dict[int, torch.Tensor] = {}
        self._evaluation: dict[int, tuple[int, int]] = {}

    def add(self, layer_number: int, is_training: bool, outcome: Outcome) -> None:
        """Count a forward pass."""
        if is_training and outcome.loss is not None and outcome.num_right is not None:
            right, loss = outcome.num_right.double(), outcome.loss.double()
            row = torch.stack((torch.full_like(loss, outcome.num_tokens), right, loss))
            self._training[layer_number] = self._training.get(layer_number, 0) + row
        elif not is_training:
            tokens, chosen = self._evaluation.get(layer_number, (0, 0))
            self._evaluation[layer_number] = (
                tokens + outcome.num_tokens,
                chosen + outcome.num_chosen,
            )

    def collect(self, device: torch.device) -> dict[str, float]:
        """Sum over all ranks and start anew.

        Collective:
            All ranks of the world.
        """
        table = torch.zeros(self._num_layers, 5, dtype=torch.float64, device=device)
        for number, row in self._training.items():
            table[number - 1, :3] = row
        for number, counts in self._evaluation.items():
            table[number - 1, 3:] = torch.tensor(counts, dtype=torch.float64)
        self._training, self._evaluation = {}, {}
        dist.all_reduce(table)
        found = {}
        for number, (seen, right, loss, evaluated, chosen) in enumerate(table.tolist(), start=1):
            if seen:
                for name, value in zip(self._TRAINED, (right, loss), strict=True):
                    found[f"{name}/layer_{number}"] = value / seen
            if evaluated:
                found[f"{self._EVALUATED}/layer_{number}"] = chosen / evaluated
        return found


DYNAMIC = MixtureOfDepths

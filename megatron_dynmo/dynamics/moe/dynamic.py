"""The load of experts in Megatron's own MoE layers: counted, and in tests skewed on purpose.

Whatever chooses the experts (auxiliary losses, Sinkhorn, expert bias, quantile balancing), the map
of tokens to experts is what Megatron's router returns, and there it is read.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.layer_work import WorkShares, is_moe_layer
from megatron_dynmo.dynamics.moe.skew import expert_weights, logit_bias, noise_seed
from megatron_dynmo.dynamics.protocol import Dynamic, LayerFactors, Step
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags.moe import SkewSpec

# A change of a layer's skew that is worth an event, relative to the last one reported.
_NEWS = 0.1
_NO_BACKWARD = -1


class ExpertLoad(Dynamic):
    """See the module; one object a run."""

    kind = "moe"

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        super().__init__(config, args)
        self._skew = SkewSpec.parse(config.moe_skew) if config.moe_skew else None
        self._layers = [n for n in range(1, args.num_layers + 1) if is_moe_layer(args, n)]
        self._next: int | None = None
        self._biases: dict[int, torch.Tensor] = {}
        # Tokens of each expert in this iteration, by layer_number, of this rank's tokens.
        self._counts: dict[int, torch.Tensor] = {}
        # By layer_number: largest over mean, of experts and of expert-parallel ranks.
        self._loads: dict[int, tuple[float, float]] = {}
        self._reported: dict[int, tuple[float, float]] = {}
        self._factors: dict[int, LayerFactors] = {}

    @classmethod
    def refusals(cls, config: DynMoConfig, args: Namespace) -> list[str]:
        """See `Dynamic.refusals`."""
        found = []
        if args.num_experts is None:
            found.append("the model has no MoE layer; give --num-experts or leave --dynmo-moe out")
        if getattr(args, "cuda_graph_impl", "none") not in (None, "none"):
            found.append(
                "--cuda-graph-impl: captured routers replay without being counted; drop it"
            )
        if config.moe_skew and args.context_parallel_size > 1:
            found.append(
                "--dynmo-moe-skew goes by places in whole sequences; drop context parallelism"
            )
        return found

    def shape(self, layer: Any) -> None:
        """Count what a layer's router decides, and bias it if asked to."""
        if not layer.is_moe_layer or layer.is_mtp_layer:
            return
        router = layer.mlp.router
        router.register_forward_hook(partial(self._count, layer.layer_number))
        if self._skew is not None:
            router.gating = partial(self._biased, layer.layer_number, router, router.gating)

    @property
    def _iteration(self) -> int:
        """Whose skew it is: of the iteration that runs, and in an evaluation of the next one."""
        if self._next is None:  # evaluation of a checkpoint, before or without any training
            return int(getattr(self.args, "iteration", 0) or 0) + 1
        return self._next

    def _skew_as_in(self, iteration: int) -> None:
        self._next = iteration
        self._biases.clear()

    def begin_iteration(self, iteration: int) -> None:
        """Start to count, and expect what the last iteration has shown."""
        self._skew_as_in(iteration)
        self._counts.clear()
        # Not announced when found: the times of that iteration have it in them already.
        self._factors = {number: self._factor(number) for number in self._loads}

    def after_step(self, step: Step) -> Mapping[str, Any] | None:
        """Merge the counts; report them where they differ from what was reported last."""
        self._skew_as_in(step.iteration + 1)
        experts = self.args.num_experts
        counts = torch.zeros(
            len(self._layers), experts, dtype=torch.float64, device=step.run.device
        )
        for number, row in self._counts.items():
            counts[self._layers.index(number)] = row
        self._loads = dict(zip(self._layers, _uneven(counts), strict=True))
        if not any(self._is_news(number) for number in self._layers):
            return None
        self._reported = dict(self._loads)
        dist.all_reduce(counts)
        return {
            "layers": [
                {
                    "layer_number": number,
                    "tokens_per_expert": [int(tokens) for tokens in row],
                    "expert_max_over_mean": self._loads[number][0],
                    "rank_max_over_mean": self._loads[number][1],
                }
                for number, row in zip(self._layers, counts.tolist(), strict=True)
            ]
        }

    def factors(self, layer_number: int) -> LayerFactors:
        """Work of the slowest expert-parallel rank over that of an even load."""
        return self._factors.get(layer_number, LayerFactors())

    def work(self, layer_number: int) -> LayerFactors:
        """All of it: skew changes who does it."""
        return LayerFactors()

    def counters(self) -> Mapping[str, float]:
        """Largest over mean of every MoE layer, of its experts and of its ranks."""
        found = {}
        for number, (expert, rank) in self._loads.items():
            found[f"expert_max_over_mean/layer_{number}"] = expert
            found[f"rank_max_over_mean/layer_{number}"] = rank
        return found

    def state(self) -> Any:
        """See `Dynamic.state`: whether the ranks meet over an event depends on the last one."""
        return {
            name: {str(number): pair for number, pair in loads.items()}
            for name, loads in (("loads", self._loads), ("reported", self._reported))
        }

    def take_up(self, state: Any) -> None:
        """See `Dynamic.take_up`."""
        if state is None:  # of a version that kept none
            return
        self._loads, self._reported = (
            {int(n): (float(pair[0]), float(pair[1])) for n, pair in state[name].items()}
            for name in ("loads", "reported")
        )
        if not {*self._loads, *self._reported} <= {*self._layers}:
            raise ConfigError(
                f"the state of moe is that of layers {sorted(self._loads)}, but the MoE layers of "
                f"this model are {self._layers}"
            )

    def _factor(self, layer_number: int) -> LayerFactors:
        experts = WorkShares.of_run(self.args, is_moe=True).experts
        factor = 1 + experts * (self._loads[layer_number][1] - 1)
        return LayerFactors(factor, factor)

    def _is_news(self, layer_number: int) -> bool:
        if layer_number not in self._reported:
            return True
        pairs = zip(self._loads[layer_number], self._reported[layer_number], strict=True)
        return any(abs(now - before) > _NEWS * before for now, before in pairs)

    def _count(self, layer_number: int, router: Any, args: Any, output: Any) -> None:
        """Hook: add up the tokens of each expert, once for each micro-batch."""
        # What is recomputed runs in the midst of a backward pass. Whether it has a graph does not
        # tell: a layer of a frozen front never has one.
        if not router.training or torch._C._current_graph_task_id() != _NO_BACKWARD:
            return
        tokens = output[1].detach().sum(dim=0, dtype=torch.float64)
        self._counts[layer_number] = self._counts.get(layer_number, 0) + tokens

    def _biased(
        self, layer_number: int, router: Any, gating: Callable[..., torch.Tensor], hidden: Any
    ) -> torch.Tensor:
        """Take the place of a router's `gating`: its logits, and the bias of each token's place."""
        logits = gating(hidden)
        if layer_number not in self._biases:
            assert self._skew is not None
            weights = expert_weights(
                *(self._skew, logits.shape[-1], layer_number),
                *(self.args.num_layers, self._iteration),
            )
            seed = noise_seed(self.args.seed, layer_number, self._iteration)
            self._biases[layer_number] = logit_bias(weights, self.args.seq_length, seed).to(
                logits.device
            )
        group = mpu.get_tensor_model_parallel_group()
        start = group.rank() * logits.shape[0] if router.config.sequence_parallel else 0
        bias = self._biases[layer_number][start : start + logits.shape[0]]
        return logits + bias.to(logits.dtype).unsqueeze(1)


def _uneven(counts: torch.Tensor) -> list[tuple[float, float]]:
    """How uneven the load of each layer is, where it is worst.

    Args:
        counts: float64 [layers, experts], tokens that this rank's routers sent to each expert; zero
            for layers of other stages.

    Returns:
        By layer, largest over mean: of experts, and of the ranks that they are dealt to.

    Collective:
        The groups among which tokens are dealt, then all ranks of the world.
    """
    counts = counts.clone()
    dist.all_reduce(counts, group=mpu.get_expert_tensor_and_model_parallel_group())
    ranks = mpu.get_expert_model_parallel_world_size()
    by_rank = counts.view(counts.shape[0], ranks, -1).sum(dim=2)
    # One where a layer is of another stage, or had no token: the least that can be.
    worst = torch.stack(
        [
            torch.nan_to_num(load.amax(dim=1) / load.mean(dim=1), nan=1.0)
            for load in (counts, by_rank)
        ],
        dim=1,
    )
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return [(expert, rank) for expert, rank in worst.tolist()]


DYNAMIC = ExpertLoad

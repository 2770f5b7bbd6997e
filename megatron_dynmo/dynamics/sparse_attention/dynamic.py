"""Dynamic sparse attention: tokens attend within hash buckets, whose number changes while training.

The number of buckets of a layer follows a schedule, or the content: what share of the scores the
hash left to compute. Hash seeds are a function of seed, layer and iteration.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.protocol import Dynamic, LayerFactors, Step
from megatron_dynmo.dynamics.sparse_attention.block_attention import BLOCK_SIZE
from megatron_dynmo.dynamics.sparse_attention.cost import expected_density, relative_times
from megatron_dynmo.dynamics.sparse_attention.hash_codes import Hashing
from megatron_dynmo.dynamics.sparse_attention.support import refusals
from megatron_dynmo.errors import ConfigError

# Iterations between two looks at the content, and how far off the wish it may be.
_FOLLOW_EVERY, _TOLERANCE = 5, 0.15
# A density that has changed by less than this is not worth an event.
_NEWS = 0.1


class SparseAttention(Dynamic):
    """See the module."""

    kind = "sparse_attention"

    def __init__(self, config: DynMoConfig, args: Namespace) -> None:
        super().__init__(config, args)
        self._schedule = config.bucket_schedule
        self._wish = config.sparse_attention_density
        self._num_layers = int(args.num_layers)
        most = max(step.buckets for step in self._schedule.steps)
        if most > args.seq_length:
            raise ConfigError(
                f"--dynmo-sparse-attention-buckets asks for {most} buckets of a sequence of "
                f"{args.seq_length} tokens; give at most that, and sensibly a hundredth of it"
            )
        if self._schedule.last_layer > self._num_layers:
            raise ConfigError(
                f"--dynmo-sparse-attention-buckets names layer {self._schedule.last_layer}, but "
                f"the model has {self._num_layers}"
            )
        self._completed: int | None = None
        self._buckets = self._scheduled(0)
        # Density of each layer that was told last; until then, what is to be expected.
        self._told: list[float] = [self._expected(n) for n in self._buckets]
        self._measured: list[float | None] = [None] * self._num_layers
        self._counts: dict[int, tuple[Tensor, int]] = {}

    @classmethod
    def refusals(cls, config: DynMoConfig, args: Namespace) -> list[str]:
        """See `Dynamic.refusals`."""
        return refusals(config, args)

    def shape(self, layer: Any) -> None:
        """See `Dynamic.shape`; layers that stay dense keep Megatron's own attention."""
        number = layer.layer_number
        if self._wish is None and not self._schedule.touches(number):
            return
        # Only where Megatron builds layers: imports what they are made of.
        from megatron_dynmo.dynamics.sparse_attention.core import SparseCore

        SparseCore(
            layer.self_attention, number, partial(self._hashing, number), partial(self._add, number)
        )

    def begin_iteration(self, iteration: int) -> None:
        """See `Dynamic.begin_iteration`."""
        self._at(iteration - 1)
        self._counts = {}

    def after_step(self, step: Step) -> Mapping[str, Any] | None:
        """Set the buckets of the next iteration.

        Collective:
            All ranks of the world: sums the scores that every layer computed.
        """
        self._measured = self._measure(step.run.device)
        before = self._buckets
        if self._wish is not None and step.iteration % _FOLLOW_EVERY == 0:
            self._buckets = [self._followed(i) for i in range(self._num_layers)]
        self._at(step.iteration)
        told = [self._news(i, before[i]) for i in range(self._num_layers)]
        if self._buckets == before and told == self._told:
            return None
        self._told = told
        return {"buckets": self._buckets, "density": [round(x, 4) for x in told]}

    def factors(self, layer_number: int) -> LayerFactors:
        """See `Dynamic.factors`."""
        if self._buckets[layer_number - 1] == 1:
            return LayerFactors()
        return LayerFactors(*relative_times(self._told[layer_number - 1], self.args))

    def counters(self) -> Mapping[str, float]:
        """See `Dynamic.counters`."""
        density = [1.0 if x is None else x for x in self._measured]
        return {
            "density": sum(density) / len(density),
            **{f"density_layer_{number}": x for number, x in enumerate(density, 1)},
            **{f"buckets_layer_{number}": float(n) for number, n in enumerate(self._buckets, 1)},
        }

    def state(self) -> Any:
        """See `Dynamic.state`."""
        return {"buckets": self._buckets, "density": self._told}

    def take_up(self, state: Any) -> None:
        """See `Dynamic.take_up`; a schedule may be another one than before."""
        buckets = [int(n) for n in state["buckets"]]
        density = [float(x) for x in state["density"]]
        if not len(buckets) == len(density) == self._num_layers or min(buckets) < 1:
            raise ConfigError(
                f"the state of sparse_attention is that of {len(buckets)} layers, but the model "
                f"has {self._num_layers}"
            )
        self._buckets, self._told = buckets, density

    # -------------------------------------------------------------------- what layers ask and tell

    def _hashing(self, layer_number: int) -> Hashing:
        if self._completed is None:  # evaluation before any training
            self._at(int(self.args.iteration))
        assert self._completed is not None
        return Hashing(
            buckets=self._buckets[layer_number - 1],
            rounds=self.config.sparse_attention_rounds,
            is_shared=self.config.sparse_attention_codes == "shared",
            seed=int(self.args.seed),
            iteration=self._completed + 1,
        )

    def _add(self, layer_number: int, computed: Tensor, causal: int) -> None:
        old = self._counts.get(layer_number)
        self._counts[layer_number] = (
            (computed, causal)
            if old is None
            else (
                old[0] + computed,
                old[1] + causal,
            )
        )

    # ------------------------------------------------------------------------------- the schedule

    def _at(self, completed: int) -> None:
        self._completed = completed
        if self._wish is None:
            self._buckets = self._scheduled(completed)

    def _scheduled(self, completed: int) -> list[int]:
        return [self._schedule.at(completed, n) for n in range(1, self._num_layers + 1)]

    # -------------------------------------------------------------------------------- the content

    def _measure(self, device: torch.device) -> list[float | None]:
        """Density of every layer in the step that ended, over all ranks; None where dense.

        Sums of whole numbers: the same whichever rank ran a layer.
        """
        sums = torch.zeros(self._num_layers, 2, dtype=torch.int64, device=device)
        for number, (computed, causal) in self._counts.items():
            sums[number - 1, 0] = computed
            sums[number - 1, 1] = causal
        dist.all_reduce(sums)
        return [computed / causal if causal else None for computed, causal in sums.tolist()]

    def _followed(self, index: int) -> int:
        """Buckets by which a layer comes nearer to the wished density."""
        assert self._wish is not None
        now = self._buckets[index]
        density = self._measured[index]
        excess = (1.0 if density is None else density) / self._wish
        if excess > 1 + _TOLERANCE:
            # Beyond one bucket a block, more of them save nothing.
            most = max(2, int(self.args.seq_length) // BLOCK_SIZE)
            return min(max(now, most), math.ceil(now * min(excess, 2.0)))
        if excess < 1 - _TOLERANCE:
            fewer = max(1, math.floor(now * max(excess, 0.5)))
            grown = excess * self._expected(fewer) / self._expected(now)
            return fewer if grown <= 1 + _TOLERANCE else now
        return now

    def _news(self, index: int, before: int) -> float:
        """Density to tell of a layer for the next iteration."""
        now, measured, told = self._buckets[index], self._measured[index], self._told[index]
        if now == 1:
            return 1.0
        if now != before:
            was = told if measured is None else measured
            return was * self._expected(now) / self._expected(before)
        if measured is not None and abs(measured - told) > _NEWS * told:
            return measured
        return told

    def _expected(self, buckets: int) -> float:
        rounds = self.config.sparse_attention_rounds
        return expected_density(buckets, rounds, int(self.args.seq_length))


DYNAMIC = SparseAttention

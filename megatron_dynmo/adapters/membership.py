"""A run whose ranks leave and come back: where they are, and what they must know.

Tier: adapter. When to do that is decided elsewhere; how groups are made anew is `world`'s.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.training.async_utils import maybe_finalize_async_save

from megatron_dynmo.adapters.checkpoint import DYNAMICS, MEMORY
from megatron_dynmo.adapters.process_groups import renumber_optimizer
from megatron_dynmo.adapters.topology import Topology
from megatron_dynmo.adapters.world import FormGroups, World
from megatron_dynmo.elastic.packing import StageMap
from megatron_dynmo.layout import LayerLayout

# Arguments that change from iteration to iteration, and that a rank that comes back must take over.
_PROGRESS = (
    "curr_iteration",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_floating_point_operations_so_far",
    MEMORY,
    DYNAMICS,
)


class Membership:
    """The ranks of one run.

    Ranks and stages are named by the numbers they had at the start.

    Args:
        run: a `MegatronRun`.
        form_groups: makes all process groups from Megatron's arguments; None where nobody leaves.
        by_node: whether only whole nodes are of use.

    Attributes:
        world: the ranks that train.
        stage_map: where the stages of the start run.

    Collective:
        All ranks of the world.
    """

    def __init__(self, run: Any, form_groups: FormGroups | None, by_node: bool) -> None:
        self._run = run
        self.world = World(run.args, form_groups)
        topology = run.topology
        stages = torch.zeros(topology.world_size, dtype=torch.int64, device=topology.device)
        stages[topology.rank] = topology.pp_rank
        dist.all_reduce(stages)
        self._stage_of = stages.tolist()
        self._node_of = self._nodes()
        self.stage_map = StageMap(
            tuple(
                frozenset(self.nodes_of(self.ranks_of([stage])) if by_node else ())
                for stage in range(topology.pp_size)
            ),
            topology.world_size // topology.pp_size,
        )

    @property
    def stage(self) -> int:
        """This rank's stage at the start."""
        return int(self._stage_of[self.world.rank])

    def ranks_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """All ranks of these stages, ascending."""
        return tuple(rank for rank, stage in enumerate(self._stage_of) if stage in stages)

    def nodes_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Names of the nodes on which these ranks run, each once."""
        return tuple(dict.fromkeys(self._node_of[rank] for rank in ranks))

    def leave(self) -> None:
        """Be in no group with any other rank; this rank holds no layer.

        Collective:
            All ranks that train; those that stay call `regroup`.
        """
        maybe_finalize_async_save(blocking=True)
        with self._run.stage.settled():
            self.world.be_alone()
        torch.cuda.empty_cache()

    def regroup(self, stages: Sequence[int], layout: LayerLayout) -> None:
        """Go on with the ranks of these stages.

        Args:
            stages: ascending.
            layout: on them; every rank holds its layers already.

        Collective:
            All ranks of the stages; those that leave call `leave`.
        """
        run = self._run
        maybe_finalize_async_save(blocking=True)
        tracker = get_moe_metrics_tracker()
        with run.stage.settled():
            self.world.reform(
                self.ranks_of(stages), len(stages), (run.model, run.optimizer, tracker)
            )
        renumber_optimizer(run.optimizer)
        run.topology = Topology.of_this_rank()
        run.stage.regroup(run.topology, layout)
        run.regrouped()

    def progress(self) -> dict[str, Any]:
        """How far training is, as JSON can hold it, for ranks that come back."""
        args, optimizer = self._run.args, self._run.optimizer
        return {
            "generation": self.world.generation,
            "scheduler_steps": self._run.scheduler.num_steps,
            "arguments": {name: getattr(args, name, None) for name in _PROGRESS},
            "scalers": [
                _scaler_state(member) for member in getattr(optimizer, "chained_optimizers", ())
            ],
        }

    def take_over(self, progress: dict[str, Any]) -> None:
        """Be as far as the ranks that went on."""
        args, optimizer = self._run.args, self._run.optimizer
        self.world.catch_up(progress["generation"])
        for name, value in progress["arguments"].items():
            if value is not None:
                setattr(args, name, value)
        args.iteration = args.curr_iteration
        self._run.scheduler.num_steps = progress["scheduler_steps"]
        self._run.scheduler.step(increment=0)
        for member, state in zip(optimizer.chained_optimizers, progress["scalers"], strict=True):
            if state is not None:
                scale = torch.tensor([state["scale"]], dtype=torch.float32)
                member.grad_scaler.load_state_dict({**state, "scale": scale})
        if self._run.dynamics is not None:
            self._run.dynamics.restore()

    def _nodes(self) -> list[str]:
        """Node of every rank: each one is asked, since a launcher may number them in any order."""
        store, world_size = self.world.store, dist.get_world_size()
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        store.set(f"node/{self.world.rank}", name)
        if self.world.rank == 0:
            names = [store.get(f"node/{rank}").decode() for rank in range(world_size)]
            store.set("nodes", "\n".join(names))
        return list(store.get("nodes").decode().split("\n"))


def _scaler_state(member: Any) -> dict[str, Any] | None:
    """State of a dynamic loss scale; None for a constant one."""
    scaler = getattr(member, "grad_scaler", None)
    state = None if scaler is None else scaler.state_dict()
    return {**state, "scale": float(state["scale"])} if state else None

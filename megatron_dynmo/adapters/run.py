"""MegatronRun: what the controller asks of a training run, answered from Megatron's globals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

from megatron_dynmo.adapters import emulated, support
from megatron_dynmo.adapters.checkpoint import MEMORY
from megatron_dynmo.adapters.digest import digests
from megatron_dynmo.adapters.layer_rng import LayerRng
from megatron_dynmo.adapters.membership import Membership
from megatron_dynmo.adapters.stage import MegatronStage
from megatron_dynmo.adapters.topology import Topology
from megatron_dynmo.adapters.world import require_reformable, require_resumable
from megatron_dynmo.changes import Changes, announced
from megatron_dynmo.clock import Clock, make_clock
from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.layer_work import is_moe_layer
from megatron_dynmo.dynamics.protocol import Step
from megatron_dynmo.errors import ConfigError, LayoutError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.migrator import MigrationReport
from megatron_dynmo.plan import MigrationPlan, build_plan
from megatron_dynmo.profiler import ChunkModules, StaticBytes


class MegatronRun:
    """One training run as the controller sees it.

    Args:
        model: Megatron's `model` list.
        optimizer: Megatron's ChainedOptimizer; None when nothing is trained.
        dynamics: the run's `Dynamics`; None without any.
        scheduler: Megatron's OptimizerParamScheduler.
    """

    def __init__(
        self, model: Sequence[Any], optimizer: Any, dynamics: Any = None, scheduler: Any = None
    ) -> None:
        self.args = get_args()
        self.topology = Topology.of_this_rank()
        self.model = model
        self.optimizer = optimizer
        self.dynamics = dynamics
        self.scheduler = scheduler
        self.stage = MegatronStage(self.topology, model, optimizer, self.args, dynamics)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return int(self.args.num_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """1-based numbers of the MoE layers of the model."""
        numbers = range(1, self.num_layers + 1)
        return tuple(number for number in numbers if is_moe_layer(self.args, number))

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the current iteration."""
        return int(get_num_microbatches())

    @property
    def train_iters(self) -> int:
        """Iteration at which training ends."""
        return int(self.args.train_iters or 0)

    @property
    def first_iteration(self) -> int:
        """Iterations completed before this process began."""
        return int(self.args.iteration)

    @property
    def memory(self) -> str | None:
        """What decisions rest on, as JSON text; it travels in checkpoints. None at first."""
        memory: str | None = getattr(self.args, MEMORY, None)
        return memory

    @memory.setter
    def memory(self, text: str) -> None:
        setattr(self.args, MEMORY, text)

    @property
    def log_interval(self) -> int:
        """Iterations between two of Megatron's log lines."""
        return int(self.args.log_interval)

    @property
    def seed(self) -> int:
        """Megatron's --seed."""
        return int(self.args.seed)

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens that one iteration trains on, over all data-parallel ranks."""
        args = self.args
        samples = self.num_microbatches * args.micro_batch_size * args.data_parallel_size
        return int(samples * args.seq_length)

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for another one: Megatron's --distributed-timeout-minutes."""
        return float(self.args.distributed_timeout_minutes * 60)

    def start_dynamics(self) -> None:
        """Let the dynamics meet the model and optimizer, built and loaded.

        Collective:
            All ranks of the world.
        """
        if self.dynamics is not None:
            self.dynamics.begin(self)

    def begin_dynamics(self, iteration: int) -> None:
        """Let the dynamics get ready for an iteration."""
        if self.dynamics is not None:
            self.dynamics.begin_iteration(iteration)

    def change(self, iteration: int, grad_norm: Any) -> Changes:
        """Let the dynamics act after an iteration.

        Collective:
            All ranks of the world.
        """
        if self.dynamics is None:
            return Changes()
        before = self.dynamics.all_factors(self.num_layers)
        reforms = self.stage.num_reforms
        norm = None if grad_norm is None else float(grad_norm)
        found = self.dynamics.after_step(Step(iteration, self, norm))
        return Changes(
            events=tuple((change.kind, change.what) for change in found),
            hints=tuple(announced(before, self.dynamics.all_factors(self.num_layers)))
            if found
            else (),
            has_reformed=self.stage.num_reforms > reforms,
        )

    def counters(self) -> dict[str, float]:
        """Numbers of the dynamics for TensorBoard and W&B."""
        return {} if self.dynamics is None else self.dynamics.counters()

    def make_membership(
        self, form_groups: Any, *, packs: bool, by_node: bool, restarts: bool
    ) -> Membership:
        """Where the ranks of this run are, and what lets them leave and come back.

        Args:
            form_groups: makes all process groups from Megatron's arguments; None where the script
                makes them itself.
            packs: whether ranks may leave.
            by_node: whether only whole nodes are of use.
            restarts: whether the run may end to be started anew.

        Raises:
            ConfigError: Ranks are to leave a run that counts on all of them, or a run is to be
                started anew that could not resume.

        Collective:
            All ranks of the world.
        """
        if packs:
            form_groups = require_reformable(self.args, form_groups)
        if packs and restarts:
            require_resumable(self.args)
        return Membership(self, form_groups, by_node)

    def check_movable(self, config: DynMoConfig) -> None:
        """Refuse a model whose layers cannot be moved, now that it is known whole.

        Raises:
            ConfigError: Names the features and the remedy.
            LayoutError: A forced layout does not fit the model.

        Collective:
            All ranks of the pipeline group.
        """
        support.require_movable(self.args)
        self._check_overlap(config)
        assert len(self.stage.specs) == self.num_layers
        for move in config.forced_moves:
            self.check_layout(self.parse_layout(move.layout))

    def _check_overlap(self, config: DynMoConfig) -> None:
        if config.overlap_moves and self.device.type == "cuda":
            # Megatron's messages and ours would be two NCCL communicators at work at once, or one
            # used by two threads; neither could be tried.
            raise ConfigError(
                "--dynmo-overlap-moves: moves overlap with computation over gloo only, not over "
                "NCCL; leave it out, and moves are whole before training goes on"
            )

    def parse_layout(self, text: str) -> LayerLayout:
        """Read a Megatron layout string for this run.

        Raises:
            LayoutError: It is not legal for this model and pipeline.
        """
        return LayerLayout.from_megatron(
            text, num_layers=self.num_layers, num_stages=self.topology.pp_size
        )

    def check_layout(self, new: LayerLayout) -> None:
        """Refuse a layout that this model cannot reach by moving layers.

        Raises:
            LayoutError: It has other stages or virtual stages than the run, or would move the
                layer that the MTP block hangs on.

        Collective:
            All ranks of the pipeline group.
        """
        now = self.stage.layout
        build_plan(now, new)
        if now.mtp_num_layers and new.owner_of(now.num_layers) != now.owner_of(now.num_layers):
            raise LayoutError(
                f"the layout {new} moves layer {now.num_layers}, the last one, which the final "
                "layer norm and the multi-token-prediction block hang on; keep it on "
                f"(pp_rank, vp_stage) {now.owner_of(now.num_layers)}"
            )

    def chunk_modules(self) -> list[ChunkModules]:
        """Modules of this rank for the profiler, by chunk."""
        return [
            ChunkModules(
                vp_stage=chunk.vp_stage,
                layers=tuple((layer.layer_number, layer) for layer in chunk.layers),
                embedding=getattr(chunk.core, "embedding", None),
                output=getattr(chunk.core, "output_layer", None),
            )
            for chunk in self.stage.chunks
        ]

    def static_bytes(self) -> StaticBytes:
        """Bytes of parameters, gradients and optimizer state held by this rank."""
        if support.refusals(self.args):
            return StaticBytes({})  # their optimizers keep state in ways of their own
        layers, embedding, output = self.stage.static_bytes()
        return StaticBytes(layers, embedding, output)

    def digests(self) -> dict[str, str]:
        """Digest of every unit of the model, independent of the layout.

        Collective:
            All ranks of the world.
        """
        return digests(self.topology, self.stage)

    def make_clock(self) -> Clock:
        """The clock that this run is measured with.

        Raises:
            ConfigError: The emulation file is wrong or describes another model.
        """
        if not self.is_emulated:
            return make_clock(self.device)
        device = emulated.start(
            self.args.dynmo_emulate,
            self.topology,
            self.num_layers,
            lambda: int(self.args.curr_iteration) + 1,
        )
        device.attach(self.chunk_modules())
        if self.dynamics is not None:
            device.follow(self.dynamics.factors)
        return device.clock

    @property
    def is_emulated(self) -> bool:
        """Whether all times of this run are virtual."""
        return self.args.dynmo_emulate is not None

    def save_and_end(self) -> None:
        """Let Megatron's loop save and end after the next iteration, as by its --exit-interval."""
        self.args.exit_interval = 1

    def moved(self, plan: MigrationPlan, report: MigrationReport) -> MigrationReport:
        """Take note of a move that was made; emulated devices say what it cost.

        Collective:
            All ranks of the world.
        """
        device = emulated.device() if self.is_emulated else None
        return report if device is None else device.moved(plan, report, self.chunk_modules())

    def regrouped(self) -> None:
        """Take note that other ranks train together now.

        Collective:
            All ranks of the world.
        """
        if self.is_emulated and (device := emulated.device()) is not None:
            device.meet()

    def make_layer_rng(self) -> LayerRng:
        """Dropout streams by layer, attached to the model."""
        streams = LayerRng(self.seed)
        streams.attach(self.model)
        return streams

    def writers(self) -> list[Any]:
        """TensorBoard and W&B writers; empty except on the rank that has them."""
        return [w for w in (get_tensorboard_writer(), get_wandb_writer()) if w is not None]

    @property
    def is_writer_rank(self) -> bool:
        """Whether this rank, the last of the world, has Megatron's TensorBoard and W&B writers."""
        return self.topology.rank == self.topology.world_size - 1

    @property
    def device_memory_bytes(self) -> float | None:
        """Memory of this rank's GPU; None on a CPU, whose memory all ranks share."""
        if self.device.type != "cuda":
            return None
        return float(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def device(self) -> torch.device:
        """Device of this rank's parameters and collectives."""
        return self.topology.device

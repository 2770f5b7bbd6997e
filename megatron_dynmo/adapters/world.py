"""The ranks that train together: how some leave, go on alone, and come back.

All process groups of torch and of Megatron are destroyed and made anew by Megatron's own start-up
code, among the ranks that stay and with their new numbers. So every group, also those of the whole
world that Megatron's loop uses, is one of those ranks alone, and nothing of a group that is no
longer used is left. A rank that left is a world of its own, with no connection to any other but
torch's store.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.distributed import distributed_c10d

from megatron_dynmo.adapters.process_groups import groups_by_name, replace_groups
from megatron_dynmo.errors import ConfigError, MigrationError

# Arguments that count on the ranks of the start, or on data that every stage reads.
_UNSUPPORTED = (
    "use_sharp",
    "enable_ft_package",
    "check_weight_hash_across_dp_replicas_interval",
    "sft",
    "log_straggler",
)

# Arguments with which a run does not go on where its last checkpoint is.
_NOT_RESUMED = (
    "finetune",
    "ckpt_step",
    "override_ckpt_iteration",
    "no_load_optim",
    "no_save_optim",
    "no_load_rng",
    "no_save_rng",
)

type FormGroups = Callable[[Any], None]
"""Megatron's `_initialize_distributed` of this run, given the store to meet in."""


class World:
    """This rank's view of which ranks train.

    Ranks keep the number they had when the job began as their name.

    Args:
        args: Megatron's arguments.
        form_groups: makes all groups from the arguments; None where they stay as they are.

    Attributes:
        rank: this rank's name.
        members: names of the ranks that train, in the order of their present numbers.
        generation: how often the groups were made anew.
        store: torch's store, for messages.
    """

    def __init__(self, args: Namespace, form_groups: FormGroups | None) -> None:
        self._args = args
        self._form_groups = form_groups
        self._old: dict[str, dist.ProcessGroup] | None = None
        # It outlives the groups; there is no public way to the one that the launcher set up.
        self._store = distributed_c10d._get_default_store()
        self.store = dist.PrefixStore("dynmo/elastic", self._store)
        self.rank = dist.get_rank()
        self.members = tuple(range(dist.get_world_size()))
        self.generation = 0

    def reform(self, members: Sequence[int], num_stages: int, holders: Sequence[Any]) -> None:
        """Go on with these ranks alone, or with these too.

        Args:
            members: names of the ranks, ascending, this one among them.
            num_stages: pipeline stages they make.
            holders: all that holds groups: model chunks, optimizer and the like.

        Raises:
            MigrationError: A rank was lost meanwhile; training cannot go on.

        Collective:
            All of `members`, those that were alone too.
        """
        old = groups_by_name() if self._old is None else self._old
        with _lost_ranks_told():
            self._form(members, num_stages)
        replace_groups(holders, old, groups_by_name())

    def _form(self, members: Sequence[int], num_stages: int) -> None:
        if self._old is None:
            self._close_together()
        dist.destroy_process_group()
        mpu.destroy_model_parallel()
        self.generation += 1
        self.members, self._old = tuple(members), None
        args = self._args
        args.rank, args.world_size = self.members.index(self.rank), len(self.members)
        args.pipeline_model_parallel_size = num_stages
        args.transformer_pipeline_model_parallel_size = num_stages
        assert self._form_groups is not None
        self._form_groups(dist.PrefixStore(f"dynmo/world/{self.generation}", self._store))

    def be_alone(self) -> None:
        """Leave all groups. Megatron's own loop can be entered in a world of one.

        What Megatron knows of the pipeline stays as it was, which its loop asks for.

        Raises:
            MigrationError: A rank was lost meanwhile.

        Collective:
            All of `members`; those that stay call `reform`.
        """
        self._old = groups_by_name()
        place = mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()
        with _lost_ranks_told():
            self._close_together()
        dist.destroy_process_group()
        self.generation += 1
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # Sizes are those of the groups, but a rank is looked up among those that exist.
        mpu.set_pipeline_model_parallel_rank(place[0])
        mpu.set_tensor_model_parallel_rank(place[1])

    def catch_up(self, generation: int) -> None:
        """Take note of how often groups were made anew while this rank was alone."""
        self.generation = generation

    def _close_together(self) -> None:
        """Wait until every member has ended its last operation; closing would cut it off.

        Through the store: after a last operation in the groups the same question would come up.
        """
        arrived = f"closing/{self.generation}"
        if self.store.add(arrived, 1) == len(self.members):
            self.store.set(f"{arrived}/all", "yes")
        limit = timedelta(minutes=self._args.distributed_timeout_minutes)
        self.store.wait([f"{arrived}/all"], limit)


@contextmanager
def _lost_ranks_told() -> Iterator[None]:
    """Say what it means when ranks do not meet."""
    try:
        yield
    except RuntimeError as gone:
        reason = (str(gone) or type(gone).__name__).splitlines()[0]
        raise MigrationError(
            f"the process groups could not be made anew ({reason}): a rank was lost while ranks "
            "left or came back. Every rank holds its layers, but training must not go on: restart "
            "from the last checkpoint"
        ) from gone


def require_reformable(args: Namespace, form_groups: FormGroups | None) -> FormGroups:
    """Refuse a run whose groups cannot be made anew.

    Raises:
        ConfigError: Names the feature and what to change.
    """
    remedy = "use --dynmo-pack advise"
    if form_groups is None:
        raise ConfigError(
            "ranks of this run cannot be packed away: the script makes its process groups itself "
            f"instead of leaving that to Megatron; {remedy}"
        )
    for name in _UNSUPPORTED:
        if getattr(args, name, None):
            raise ConfigError(
                f"ranks of this run cannot be packed away with --{name.replace('_', '-')}, which "
                f"counts on the ranks of the start; leave it out, or {remedy}"
            )
    return form_groups


def require_resumable(args: Namespace) -> None:
    """Refuse a run that, started anew on more stages, would not go on where it ended.

    Raises:
        ConfigError: Names the flags to add or to leave out.
    """
    wanted = "--dynmo-release restart: the run that is started anew resumes from its own checkpoint"
    if not args.save or args.load != args.save:
        raise ConfigError(
            f"{wanted}; give --save and --load the same folder (they are {args.save} and "
            f"{args.load})"
        )
    for name in _NOT_RESUMED:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            raise ConfigError(f"{wanted}, all of it; leave --{name.replace('_', '-')} out")
    if args.ckpt_format != "torch_dist":
        raise ConfigError(
            f"{wanted} on another number of stages; --ckpt-format {args.ckpt_format} cannot, use "
            "torch_dist"
        )
    if args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable:
        raise ConfigError(
            f"{wanted} on another number of stages; add --dist-ckpt-optim-fully-reshardable"
        )

"""Flags of gradual pruning."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from megatron_dynmo.dynamics.pruning.schedule import CubicSchedule
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.flags import auto_or_count, count, flag, fraction
from megatron_dynmo.flags.group import FlagGroup


@dataclass(frozen=True)
class PruningFlags(FlagGroup):
    """What is pruned, how much of it, and when."""

    kind: ClassVar[str | None] = "pruning"

    prune: str | None = flag(
        None,
        "magnitude: the smallest weights of all MLP and attention matrices together; neuron: whole "
        "neurons of the MLPs; head: whole attention heads, or query groups under GQA",
        choices=["magnitude", "neuron", "head"],
    )
    prune_final: float = flag(
        0.9, "share that is removed in the end", type=fraction, metavar="SHARE"
    )
    prune_initial: float = flag(
        0.0, "share that the first step removes", type=fraction, metavar="SHARE"
    )
    prune_begin: int | None = flag(
        None,
        "iteration after which the first step is taken (default: 3/10 of --train-iters)",
        type=auto_or_count,
        metavar="N",
    )
    prune_end: int | None = flag(
        None,
        "iteration after which the last step reaches the final share (default: 7/10)",
        type=auto_or_count,
        metavar="N",
    )
    prune_every: int | None = flag(
        None,
        "iterations between two steps (default: 1/10 of --train-iters)",
        type=auto_or_count,
        metavar="N",
    )
    prune_groups: int | None = flag(
        None,
        "neuron and head: each of so many equal blocks of a layer loses the same number, so that "
        "runs with tensor-parallel sizes that divide it prune the same (default: that size)",
        type=auto_or_count,
        metavar="N",
        only_with=("neuron", "head"),
    )
    prune_multiple: int = flag(
        1,
        "neuron and head: what is left in a block is a multiple of this; 64 suits tensor cores",
        type=count,
        metavar="N",
        only_with=("neuron", "head"),
    )
    prune_pattern: str = flag(
        "any",
        "magnitude: which weights may go; 2:4 leaves two of every four in a row, the pattern of "
        "sparse tensor cores, and needs --dynmo-prune-final 0.5",
        choices=["any", "2:4"],
        only_with=("magnitude",),
    )
    prune_compute: str = flag(
        "auto",
        "magnitude: run each product of a matrix on sparse kernels where a measurement on this "
        "machine finds them faster (auto), never (dense) or always (sparse); the last two make two "
        "runs comparable bit for bit",
        choices=["auto", "dense", "sparse"],
        only_with=("magnitude",),
    )

    def is_on(self) -> bool:
        """Whether anything is pruned."""
        return self.prune is not None

    def check(self) -> None:
        """See `FlagGroup.check`."""
        if self.prune is not None:
            # Defaults fit whatever was given, so any length of the run finds the mistakes.
            self.pruning_schedule(10)
        is_half = Fraction(repr(self.prune_final)) == Fraction(1, 2)
        if self.prune == "magnitude" and self.prune_pattern == "2:4" and not is_half:
            raise ConfigError(
                "--dynmo-prune-pattern 2:4 leaves exactly half, but --dynmo-prune-final is "
                f"{self.prune_final:g}: give 0.5"
            )

    def pruning_schedule(self, train_iters: int) -> CubicSchedule:
        """When how much is pruned in a run.

        Args:
            train_iters: length of the run in iterations.

        Raises:
            ConfigError: The flags do not fit together.
        """
        tenth = max(train_iters // 10, 1)
        begin = self.prune_begin or min(3 * tenth, self.prune_end or 3 * tenth)
        try:
            return CubicSchedule(
                begin=begin,
                end=self.prune_end or max(7 * tenth, begin),
                every=self.prune_every or tenth,
                final=Fraction(repr(self.prune_final)),
                initial=Fraction(repr(self.prune_initial)),
            )
        except ConfigError as error:
            raise ConfigError(f"--dynmo-prune flags: {error}") from None

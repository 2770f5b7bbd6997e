"""MigrationPlan: which layer goes from which chunk to which, in the one order all ranks follow.

Pure: no torch, no Megatron, no bytes. What a layer consists of is the roster's business
(adapters); how bytes travel is the transport's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dynmo.errors import LayoutError
from megatron_dynmo.layout import LayerLayout


@dataclass(frozen=True)
class LayerMove:
    """One layer that changes its chunk.

    Attributes:
        layer_number: 1-based global number.
        src_pp_rank: pipeline rank that owns it now.
        src_vp_stage: virtual stage on that rank.
        dst_pp_rank: pipeline rank that will own it.
        dst_vp_stage: virtual stage on that rank.
    """

    layer_number: int
    src_pp_rank: int
    src_vp_stage: int
    dst_pp_rank: int
    dst_vp_stage: int

    @property
    def is_local(self) -> bool:
        """Whether it only changes the virtual stage and stays on its rank."""
        return self.src_pp_rank == self.dst_pp_rank


@dataclass(frozen=True)
class MigrationPlan:
    """The moves that lead from one layout to another, ascending by layer number.

    The order is the deadlock argument: every rank handles the moves it takes part in one after
    another in this order, so the smallest unfinished move always has both its ranks waiting for
    it or on their way to it.

    Attributes:
        old: layout in force.
        new: layout to reach.
        moves: every layer whose owner differs, once.
    """

    old: LayerLayout
    new: LayerLayout
    moves: tuple[LayerMove, ...]

    def sent_by(self, pp_rank: int) -> tuple[LayerMove, ...]:
        """Moves that leave a rank, local ones included."""
        return tuple(move for move in self.moves if move.src_pp_rank == pp_rank)

    def received_by(self, pp_rank: int) -> tuple[LayerMove, ...]:
        """Moves that arrive on a rank, local ones included."""
        return tuple(move for move in self.moves if move.dst_pp_rank == pp_rank)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The moved layers, ascending."""
        return tuple(move.layer_number for move in self.moves)


def build_plan(old: LayerLayout, new: LayerLayout) -> MigrationPlan:
    """List the moves from one layout to another; the same answer on every rank.

    Args:
        old: layout in force.
        new: layout to reach; same number of layers, stages and virtual stages.

    Raises:
        LayoutError: The two layouts describe different models or pipelines.
    """
    for what, found, wanted in (
        ("layers", new.num_layers, old.num_layers),
        ("pipeline stages", new.num_stages, old.num_stages),
        ("virtual stages", new.virtual_stages, old.virtual_stages),
        ("MTP layers", new.mtp_num_layers, old.mtp_num_layers),
    ):
        if found != wanted:
            raise LayoutError(
                f"the layout {new.to_megatron()} has {found} {what}, the running model has "
                f"{wanted} ({old.to_megatron()})"
            )
    return MigrationPlan(old, new, tuple(_moves(old, new)))


def _moves(old: LayerLayout, new: LayerLayout) -> Iterable[LayerMove]:
    for layer_number in range(1, old.num_layers + 1):
        source, target = old.owner_of(layer_number), new.owner_of(layer_number)
        if source != target:
            yield LayerMove(layer_number, *source, *target)

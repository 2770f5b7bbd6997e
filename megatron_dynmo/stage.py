"""One rank's side of a move, as the migrator sees it.

Tier: torch, not Megatron. A layer's state travels as a `Parcel` of named tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.plan import LayerMove, MigrationPlan
from megatron_dynmo.transport import Parcel


class Stage(Protocol):
    """One rank's side of a move.

    Attributes:
        new_tensors: first letters of parcel names for which an empty layer has no slot.
        late_tensors: first letters of those that only an optimizer step reads or writes.
    """

    new_tensors: tuple[str, ...]
    late_tensors: tuple[str, ...]

    def layers(self) -> Mapping[int, Any]:
        """The layers held now, by layer_number."""

    def prepare(self, plan: MigrationPlan) -> None:
        """Build empty layers for what arrives, once nothing else uses the model.

        What can fail on one rank alone belongs here and not into `settle`.

        Collective:
            All ranks of the world, to end what they began together before (a checkpoint).
        """

    def settle(self) -> None:
        """Make the running model readable; every rank has prepared.

        Collective:
            Data-parallel peers gather parameters.
        """

    def parcel(self, layer_number: int) -> Parcel:
        """State of a layer held now; tensors are the live ones and must only be read."""

    def slots(self, move: LayerMove) -> Mapping[str, torch.Tensor]:
        """Tensors of the empty layer that are to be filled, by the parcel's names."""

    def accept(self, move: LayerMove, parcel: Parcel) -> None:
        """Keep what arrived for a layer until commit."""

    def rollback(self) -> None:
        """Forget everything since `prepare`; the running model is as it was."""

    def commit(self, plan: MigrationPlan) -> None:
        """Take in what arrived and let go of what left; talks to no other rank.

        A failure here must not keep the others waiting in a collective.
        """

    def rebuild(self) -> None:
        """Make the optimizer fit what is held now; it may lose all state.

        Collective:
            All ranks of the world.
        """

    def restore(self) -> None:
        """Give the optimizer back its state; talks to no other rank."""

    def fingerprint(self, parcel: Parcel) -> int:
        """Checksum of a layer's parcel, or of a part of it; also called from another thread."""

    def fingerprints(self, without: Collection[int] = ()) -> dict[str, int]:
        """Checksum of every unit of state held now: each layer (`layer 3`) and the rest.

        Args:
            without: layer_number of layers to leave out.
        """

    def check_ownership(self, layout: LayerLayout) -> None:
        """Raise ConservationError unless this rank holds exactly its part of a layout.

        Talks to no other rank: when every rank holds its part, each layer is held once.
        """


def unit_name(layer_number: int) -> str:
    """Name of a layer in parcels, fingerprints and messages."""
    return f"layer {layer_number}"


def late_name(label: str) -> str:
    """Name of what follows a layer."""
    return f"state of {label}"

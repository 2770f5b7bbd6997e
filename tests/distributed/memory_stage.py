"""A stage of a model that is nothing but numbers, and faults to inject into its moves."""

from collections.abc import Collection, Mapping

import torch

from megatron_dynmo.checksum import checksum
from megatron_dynmo.errors import ConservationError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.plan import LayerMove, MigrationPlan
from megatron_dynmo.stage import unit_name
from megatron_dynmo.transport import Parcel

# Where a fault can strike: the methods of a stage, in the order in which a move calls them.
STEPS = (
    "prepare", "settle", "parcel", "slots", "accept", "commit", "rebuild", "restore",
    "check_ownership",
)  # fmt: skip


class MemoryStage:
    """Layers are pairs of a weight and a moment; each is filled with numbers of its own.

    Args:
        rank: this rank's pipeline rank.
        layout: what it holds at the start.
        fault: the step that fails on this rank; None for none.
    """

    new_tensors = late_tensors = ("state/",)

    def __init__(self, rank: int, layout: LayerLayout, fault: str | None = None) -> None:
        self.rank = rank
        self.fault = fault
        self.held = {n: new_layer(n) for n in layers_of(layout, rank)}
        self.rest = torch.full((5,), float(rank))
        self.incoming: dict[int, dict[str, torch.Tensor]] = {}
        self.rolled_back = 0
        self.calls: list[str] = []

    def _at(self, step: str) -> None:
        self.calls.append(step)
        if step == self.fault:
            raise MemoryError(f"injected into {step}")

    def layers(self) -> Mapping[int, dict[str, torch.Tensor]]:
        return self.held

    def prepare(self, plan: MigrationPlan) -> None:
        self.incoming = {
            move.layer_number: {"weight": torch.zeros(7)} for move in plan.received_by(self.rank)
        }
        self._at("prepare")

    def settle(self) -> None:
        self._at("settle")

    def parcel(self, layer_number: int) -> Parcel:
        self._at("parcel")
        layer = self.held[layer_number]
        return Parcel(unit_name(layer_number), dict(layer), {"layer": layer_number})

    def slots(self, move: LayerMove) -> Mapping[str, torch.Tensor]:
        self._at("slots")
        slots = dict(self.incoming[move.layer_number])
        if self.fault == "wrong shape":
            slots["weight"] = torch.zeros(8)
        return slots

    def accept(self, move: LayerMove, parcel: Parcel) -> None:
        self._at("accept")
        assert parcel.values["layer"] == move.layer_number
        self.incoming[move.layer_number] = dict(parcel.tensors)
        if self.fault == "damage":
            self.incoming[move.layer_number]["weight"][3] += 1

    def rollback(self) -> None:
        self.incoming = {}
        self.rolled_back += 1
        if self.fault == "rollback":
            raise MemoryError("injected into rollback")

    def commit(self, plan: MigrationPlan) -> None:
        self._at("commit")
        for move in plan.sent_by(self.rank):
            del self.held[move.layer_number]
        if self.fault == "lose a layer":
            self.incoming.clear()
        self.held = dict(sorted((self.held | self.incoming).items()))

    def rebuild(self) -> None:
        self._at("rebuild")

    def restore(self) -> None:
        self._at("restore")
        self.incoming = {}
        if self.fault == "touch the rest":
            self.rest += 1

    def fingerprint(self, parcel: Parcel) -> int:
        return checksum(tensor for _, tensor in sorted(parcel.tensors.items()))

    def fingerprints(self, without: Collection[int] = ()) -> dict[str, int]:
        held = [number for number in self.held if number not in without]
        found = {unit_name(n): self.fingerprint(Parcel("", self.held[n])) for n in held}
        return found | {"rest": checksum([self.rest])}

    def check_ownership(self, layout: LayerLayout) -> None:
        self._at("check_ownership")
        if tuple(self.held) != layers_of(layout, self.rank):
            raise ConservationError(f"holding {list(self.held)}, the plan was {layout}")

    def contents(self) -> dict[int, list[list[float]]]:
        """What it holds, for comparison."""
        return {n: [tensor.tolist() for tensor in layer.values()] for n, layer in self.held.items()}


def layers_of(layout: LayerLayout, rank: int) -> tuple[int, ...]:
    """Every layer of a rank, over its virtual stages."""
    return tuple(n for vp in range(layout.virtual_stages) for n in layout.layers_of(rank, vp))


def new_layer(number: int) -> dict[str, torch.Tensor]:
    """A layer whose numbers nobody else has."""
    generator = torch.Generator().manual_seed(number)
    return {
        "weight": torch.randn(7, generator=generator),
        "state/moment": torch.randn(3, number, generator=generator),
    }

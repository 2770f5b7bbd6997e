"""Diffusion between real ranks: each one talks to its two neighbours only.

Runs the rules of `balancers.diffusion` where the layers are. A rank knows the costs of the layers
it holds, its own speed and memory, and what its neighbours tell it; costs travel with the layers
that are handed over. Numbers travel as exact fractions, so the answer is that of the pure function.

Even boundaries exchange at the same time, then odd ones. Relays go one after the other: a rank
answers the offers of its neighbour until that says it has none left, then makes its own. Whether a
round moved anything, and the largest time, go along the line and back from neighbour to neighbour.
Only at the end is one collective needed, which tells every rank all boundaries: Megatron builds its
pipeline from them on every rank.

Tier: torch, not Megatron. Layers themselves are not moved here; the split that comes out is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_dynmo.balancers.diffusion import layers_to_hand_over, layers_to_relay
from megatron_dynmo.balancers.inputs import non_negative, positive
from megatron_dynmo.errors import BalanceError
from megatron_dynmo.neighbour_links import Message, NeighbourLinks

__all__ = ["NeighbourBalance", "balance_with_neighbours"]


@dataclass(frozen=True)
class NeighbourBalance:
    """Where the ranks ended; the same on each of them.

    Attributes:
        boundaries: one more than ranks; group rank s owns layers boundaries[s] + 1 ..
            boundaries[s + 1].
        rounds: rounds run, the last one, that changed nothing, included.
        history: largest stage time before the first round and after each round; never rises.
        converged: False only when max_rounds cut it short.
    """

    boundaries: list[int]
    rounds: int
    history: list[float]
    converged: bool


def balance_with_neighbours(
    layer_costs: Sequence[float],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    extra: float = 0.0,
    speed: float = 1.0,
    tolerance: float = 0.0,
    max_rounds: int | None = None,
    min_layers: int = 1,
    layer_memory: Sequence[float] | None = None,
    memory_limit: float | None = None,
    relay: bool = True,
    timeout_s: float = 600.0,
) -> NeighbourBalance:
    """Hand over boundary layers between neighbours until nobody finds anything more to do.

    Args:
        layer_costs: of the layers that this rank holds, in order, at least 0; not of others.
        group: the pipeline; its order of ranks is the order of the layers.
        device: where the group takes its tensors.
        extra: what this rank's stage costs besides its layers (embedding, output and loss).
        speed: relative speed of this rank.
        tolerance: as `diffusion`, the same on every rank, like the next two and `relay`.
        max_rounds: see there.
        min_layers: see there.
        layer_memory: bytes of this rank's layers; on all ranks or on none.
        memory_limit: bytes that this rank may not exceed by taking layers.
        relay: see `diffusion`.
        timeout_s: for one message; a neighbour that does not answer in it raises PeerLost.

    Returns:
        What `diffusion` would return for all layers together.

    Raises:
        BalanceError: input that makes no sense on some rank; raised on all, naming the rank.
        PeerLost: a neighbour failed or did not answer in time.

    Collective:
        All ranks of the group. Messages between neighbours; one all-gather at the end.
    """
    links = NeighbourLinks(group, device, timeout_s)
    problem, rank = None, None
    try:
        rank = _Rank.make(
            links, layer_costs, extra, speed, tolerance, min_layers, layer_memory, memory_limit
        )
    except BalanceError as error:
        problem = f"rank {links.rank}: {error}"
    load = rank.load if rank else Fraction(0)
    start = links.along_the_line(_told(load, problem=problem, equal_speeds=speed == 1), _merge)
    if rank is None or start["problem"]:
        raise BalanceError(start["problem"])
    rank.equal_speeds = start["equal_speeds"]
    history, converged = [float(Fraction(start["largest"]))], False
    while not converged and (max_rounds is None or len(history) <= max_rounds):
        moved, largest = rank.everywhere(rank.exchange_round())
        if not moved and relay:
            moved, largest = rank.everywhere(rank.relay_round())
        converged = not moved
        history.append(float(largest))
    boundaries = [0, *accumulate(links.gather(len(rank.layers)))]
    return NeighbourBalance(boundaries, len(history) - 1, history, converged)


class _Layer(NamedTuple):
    """What is known of a layer by the rank that holds it."""

    cost: Fraction
    memory: Fraction


@dataclass
class _Rank:
    """One rank: what it holds, and its side of the rules."""

    links: NeighbourLinks
    layers: list[_Layer]
    extra: Fraction
    speed: Fraction
    tolerance: Fraction
    min_layers: int
    memory_limit: Fraction | None
    equal_speeds: bool = True

    @classmethod
    def make(
        cls,
        links: NeighbourLinks,
        layer_costs: Sequence[float],
        extra: float,
        speed: float,
        tolerance: float,
        min_layers: int,
        layer_memory: Sequence[float] | None,
        memory_limit: float | None,
    ) -> _Rank:
        num_layers = len(layer_costs)
        if (layer_memory is None) != (memory_limit is None):
            raise BalanceError("layer_memory and memory_limit only work together")
        costs = non_negative(layer_costs, "layer_costs", num_layers)
        memory = non_negative(layer_memory or [0] * num_layers, "layer_memory", num_layers)
        (limit,) = non_negative([memory_limit or 0], "memory_limit", 1)
        (more,) = non_negative([extra], "extra", 1)
        (slack,) = non_negative([tolerance], "tolerance", 1)
        (pace,) = positive([speed], "speed", 1)
        return cls(
            links,
            [_Layer(Fraction(c), Fraction(m)) for c, m in zip(costs, memory, strict=True)],
            Fraction(more),
            Fraction(pace),
            Fraction(slack),
            min_layers,
            None if memory_limit is None else Fraction(limit),
        )

    @property
    def load(self) -> Fraction:
        """This rank's time."""
        return (_cost(self.layers) + self.extra) / self.speed

    def everywhere(self, moved: bool) -> tuple[bool, Fraction]:
        """Whether anything moved on any rank, and the largest time."""
        told = self.links.along_the_line(_told(self.load, moved=moved), _merge)
        return told["moved"], Fraction(told["largest"])

    # ---------------------------------------------------------------- hand over

    def exchange_round(self) -> bool:
        """Exchange with either neighbour, over the even boundary first."""
        moved = False
        for parity in (0, 1):
            peer = self.links.rank + (1 if self.links.rank % 2 == parity else -1)
            if self.links.has(peer):
                moved |= self._exchange(peer)
        return moved

    def _exchange(self, peer: int) -> bool:
        """Tell each other the times; the busier one gives layers.

        The left one speaks first. The right one answers with the layers it gives, if it is the
        busier; if the left one is, that follows up with its own.
        """
        if peer > self.links.rank:
            self.links.tell(peer, self._state())
            answer = self.links.hear(peer)
            if Fraction(answer["load"]) < self.load:
                given = self._hand_over(answer, peer)
                self.links.tell(peer, {"layers": _write(given)})
                return bool(given)
            return self._take(answer, peer)
        theirs = self.links.hear(peer)
        state, given = self._state(), list[_Layer]()
        if Fraction(theirs["load"]) < self.load:
            given = self._hand_over(theirs, peer)
        self.links.tell(peer, {**state, "layers": _write(given)})
        if Fraction(theirs["load"]) > Fraction(state["load"]):
            return self._take(self.links.hear(peer), peer)
        return bool(given)

    def _state(self) -> Message:
        free = self._free()
        return {
            "load": str(self.load),
            "speed": str(self.speed),
            "free": None if free is None else str(free),
        }

    def _hand_over(self, theirs: Message, peer: int) -> list[_Layer]:
        """Give up the layers that the rule says, from the boundary inwards."""
        step, free = peer - self.links.rank, theirs["free"]
        spare = list(self._spare(step, None if free is None else Fraction(free)))
        count = layers_to_hand_over(
            self.load,
            Fraction(theirs["load"]),
            (layer.cost for layer in spare),
            speed=self.speed,
            neighbour_speed=Fraction(theirs["speed"]),
            tolerance=self.tolerance,
        )
        self._replace([], count, step)
        return spare[:count]

    def _take(self, message: Message, peer: int) -> bool:
        taken = _read(message["layers"])
        self._replace(taken, 0, self.links.rank - peer)
        return bool(taken)

    def _spare(self, step: int, free: Fraction | None) -> Iterator[_Layer]:
        """Layers that may be given, from the boundary inwards, as far as the taker has room."""
        for layer in self._passable([], step):
            if free is not None:
                free -= layer.memory
                if free < 0:
                    return
            yield layer

    # ---------------------------------------------------------------- relay

    def relay_round(self) -> bool:
        """One sweep of offers to the right, then one to the left."""
        moved = False
        for step in (1, -1):
            behind, ahead = self.links.rank - step, self.links.rank + step
            while self.links.has(behind):
                offer = self.links.hear(behind)
                if offer["done"]:
                    break
                kept = self._relay(
                    _read(offer["layers"]),
                    Fraction(offer["ceiling"]),
                    Fraction(offer["squares"]),
                    step,
                )
                self.links.tell(behind, {"kept": kept})
                moved |= kept
            if self.links.has(ahead):
                moved |= self._relay([], self.load - self.tolerance, Fraction(0), step)
                self.links.tell(ahead, {"done": True})
        return moved

    def _relay(
        self, incoming: list[_Layer], ceiling: Fraction, squares: Fraction, step: int
    ) -> bool:
        """Keep what is offered, or pass layers on; nothing changes unless somebody keeps them.

        Args:
            incoming: layers offered, nearest first; none where the relay begins.
            ceiling: every rank on the way must stay below.
            squares: change of the sum of squared times so far.
            step: 1 to the right, -1 to the left.
        """
        layers = self._passable(incoming, step)
        costs = (layer.cost for layer in layers)
        count = layers_to_relay(self.load, _cost(incoming), ceiling, costs, speed=self.speed)
        if count is None or not self._has_room(incoming, layers[:count]):
            return False
        given, ahead = layers[:count], self.links.rank + step
        squares += self._change_of_square(incoming, given)
        if not given:
            kept = bool(incoming) and squares < 0
        elif self.links.has(ahead):
            offer = {"layers": _write(given), "ceiling": str(ceiling), "squares": str(squares)}
            self.links.tell(ahead, {"done": False, **offer})
            kept = bool(self.links.hear(ahead)["kept"])
        else:
            kept = False
        if kept:
            self._replace(incoming, count, step)
        return kept

    def _has_room(self, incoming: list[_Layer], given: list[_Layer]) -> bool:
        free = self._free()
        if free is None or not incoming:
            return True
        return _bytes(incoming) - _bytes(given) <= max(free, Fraction(0))

    def _change_of_square(self, incoming: list[_Layer], given: list[_Layer]) -> Fraction:
        """Change of this rank's share of the sum of squares; any fall where speeds differ."""
        if not self.equal_speeds:
            return Fraction(-1)
        change = _cost(incoming) - _cost(given)
        return change * (2 * self.load + change)

    # ---------------------------------------------------------------- layers

    def _passable(self, incoming: list[_Layer], step: int) -> list[_Layer]:
        """Layers that could be passed on, from the far boundary inwards, incoming ones last."""
        own = self.layers[::-1] if step > 0 else self.layers
        layers = [*own, *incoming]
        return layers[: max(len(layers) - self.min_layers, 0)]

    def _replace(self, incoming: list[_Layer], num_given: int, step: int) -> None:
        """Take layers from behind, nearest first, and give some up ahead."""
        if step > 0:
            held = [*incoming[::-1], *self.layers]
            self.layers = held[: len(held) - num_given]
        else:
            self.layers = [*self.layers, *incoming][num_given:]

    def _free(self) -> Fraction | None:
        if self.memory_limit is None:
            return None
        return self.memory_limit - _bytes(self.layers)


def _told(
    load: Fraction, *, moved: bool = False, problem: str | None = None, equal_speeds: bool = True
) -> Message:
    """What goes along the line of one rank."""
    return {
        "largest": str(load), "moved": moved, "problem": problem, "equal_speeds": equal_speeds,
    }  # fmt: skip


def _merge(a: Message, b: Message) -> Message:
    """What goes along the line of two ranks, or more."""
    return {
        "largest": max(a["largest"], b["largest"], key=Fraction),
        "moved": a["moved"] or b["moved"],
        "problem": a["problem"] or b["problem"],
        "equal_speeds": a["equal_speeds"] and b["equal_speeds"],
    }


def _cost(layers: Sequence[_Layer]) -> Fraction:
    return sum((layer.cost for layer in layers), Fraction(0))


def _bytes(layers: Sequence[_Layer]) -> Fraction:
    return sum((layer.memory for layer in layers), Fraction(0))


def _write(layers: Sequence[_Layer]) -> list[list[str]]:
    return [[str(layer.cost), str(layer.memory)] for layer in layers]


def _read(rows: Sequence[Sequence[str]]) -> list[_Layer]:
    return [_Layer(Fraction(cost), Fraction(memory)) for cost, memory in rows]

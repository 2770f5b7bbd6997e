"""Decentralised balancing: every rank sees its neighbours only and hands over boundary layers.

Two local rules. *Hand over*: of two neighbours the busier gives layers next to their boundary to
the other, as many as bring the larger of the two times furthest down. Boundaries take turns, even
ones first, then odd ones, so no rank takes part in two exchanges at once (dimension exchange). When
that finds nothing more, *relay*: a rank offers a layer to a neighbour that may keep it or pass
layers of its own on, hop by hop, until somebody has room; if nobody has, nothing happens. Relays
level out slopes (5, 4, 3, 2 equal layers) at which every pair of neighbours is content.

Why it stops, and is never worse than it began. Every exchange touches a set of stages of which the
busiest had time a or more, and leaves all below a (by more than `tolerance`). So the list of stage
times, sorted from the largest down, strictly falls in lexicographic order; its first element, the
largest stage time, never rises, and as there are finitely many splits there are finitely many
exchanges. At the end no move of a single boundary lowers the larger of its two stages' times.

How soon. With stages of equal speed every exchange lowers the sum of squared times F too; a relay
that would not is given up, though it may have lowered the largest time. Let g be
a common divisor of all costs and extras: F / g^2 is whole and changes in even steps, as the sum of
times is constant, so there are at most (F_start - total^2 / P) / 2 g^2 exchanges. Every round but
the last has one, hence `round_bound` = exchanges + 1. With unequal speeds the number of splits
bounds them. Both are worst cases, far away for costs measured to the last digit; the tests report
the rounds needed, a small multiple of the number of stages at most.

Source: Cybenko, Dynamic load balancing for distributed memory multiprocessors, J. Parallel Distrib.
Comput. 7 (1989), dimension exchange and diffusion of divisible load. The argument above is for
whole layers in a fixed order and is our own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from megatron_dynmo.balancers.inputs import check_boundaries, edge_row, non_negative, positive
from megatron_dynmo.balancers.resource import to_integers
from megatron_dynmo.errors import BalanceError

__all__ = ["DiffusionResult", "diffusion", "layers_to_hand_over", "layers_to_relay"]

type Exact = int | float | Fraction


@dataclass(frozen=True)
class DiffusionResult:
    """Where diffusion ended.

    Attributes:
        boundaries: num_stages + 1 boundaries.
        rounds: rounds run, the last ones, that changed nothing, included.
        history: largest stage time before the first round and after each round; never rises.
        round_bound: rounds after which it must have stopped, whatever the costs.
        converged: False only when max_rounds cut it short.
    """

    boundaries: list[int]
    rounds: int
    history: list[float]
    round_bound: int
    converged: bool


def layers_to_hand_over(
    load: Exact,
    neighbour_load: Exact,
    layer_costs: Iterable[Exact],
    *,
    speed: Exact = 1,
    neighbour_speed: Exact = 1,
    tolerance: Exact = 0,
) -> int:
    """How many layers a rank gives to a neighbour: the rule that every rank applies on its own.

    Args:
        load: my time.
        neighbour_load: the neighbour's time.
        layer_costs: costs of the layers that I may give, from the shared boundary inwards.
        speed: mine; a layer's time is its cost divided by the speed.
        neighbour_speed: the neighbour's.
        tolerance: smallest drop of the larger time that is worth it; more than this is needed.

    Returns:
        The smallest number of layers that brings the larger of both times furthest down; 0 when
        no number brings it below load - tolerance.
    """
    number, best = 0, load - tolerance
    moved: Exact = 0
    for count, cost in enumerate(layer_costs, 1):
        moved += cost
        theirs = neighbour_load + _time(moved, neighbour_speed)
        worse = max(load - _time(moved, speed), theirs)
        if worse < best:
            number, best = count, worse
        if theirs >= load:
            break
    return number


def layers_to_relay(
    load: Exact,
    incoming: Exact,
    ceiling: Exact,
    layer_costs: Iterable[Exact],
    *,
    speed: Exact = 1,
) -> int | None:
    """How many layers a rank passes on when layers are offered to it.

    Args:
        load: my time before.
        incoming: cost of the layers offered.
        ceiling: my time must stay below: the time of the rank where the relay began, less the
            tolerance.
        layer_costs: costs of the layers that I may pass on, from the far boundary inwards; the
            incoming ones come last.
        speed: mine.

    Returns:
        The smallest number that keeps me below the ceiling, 0 to keep all; None if none does.
    """
    time = load + _time(incoming, speed)
    if time < ceiling:
        return 0
    passed: Exact = 0
    for count, cost in enumerate(layer_costs, 1):
        passed += cost
        if time - _time(passed, speed) < ceiling:
            return count
    return None


def diffusion(
    layer_costs: Sequence[float],
    boundaries: Sequence[int],
    *,
    first_stage_extra: float = 0.0,
    last_stage_extra: float = 0.0,
    stage_speeds: Sequence[float] | None = None,
    tolerance: float = 0.0,
    max_rounds: int | None = None,
    min_layers: int = 1,
    layer_memory: Sequence[float] | None = None,
    stage_memory_limit: float | None = None,
    relay: bool = True,
) -> DiffusionResult:
    """Run the decentralised rules from a split until they find nothing more to do.

    Args:
        layer_costs: per layer, in order, at least 0.
        boundaries: where it begins, num_stages + 1.
        first_stage_extra: what the first stage costs besides its layers.
        last_stage_extra: the same for the last.
        stage_speeds: relative speed of each stage; equal when None.
        tolerance: an exchange must lower the time of the busiest rank in it by more than this.
        max_rounds: stop after so many rounds; run to the end when None.
        min_layers: a rank gives no layer away that would leave it fewer.
        layer_memory: bytes of each layer.
        stage_memory_limit: bytes that a rank may not exceed by taking layers.
        relay: False leaves only the exchange between two neighbours.

    Returns:
        The split, with the largest stage time of every round.

    Raises:
        BalanceError: input that makes no sense; the text names the number.
    """
    line = _Line.make(
        layer_costs, boundaries, (first_stage_extra, last_stage_extra), stage_speeds, tolerance,
        min_layers, layer_memory, stage_memory_limit,
    )  # fmt: skip
    bound = line.round_bound()
    history = [line.largest_time()]
    converged = False
    while not converged and (max_rounds is None or len(history) <= max_rounds):
        converged = not (line.exchange_round() or (relay and line.relay_round()))
        history.append(line.largest_time())
    return DiffusionResult(line.bounds, len(history) - 1, history, bound, converged)


@dataclass
class _Line:
    """The ranks of a pipeline and what each knows; numbers are exact, in units of `unit`."""

    costs: list[int]
    bounds: list[int]
    loads: list[Exact]
    speeds: list[Exact]
    tolerance: Fraction
    min_layers: int
    memory: list[int]
    memory_limit: int | None
    unit: Fraction
    grain: int
    equal_speeds: bool

    @classmethod
    def make(
        cls,
        layer_costs: Sequence[float],
        boundaries: Sequence[int],
        edges: tuple[float, float],
        stage_speeds: Sequence[float] | None,
        tolerance: float,
        min_layers: int,
        layer_memory: Sequence[float] | None,
        stage_memory_limit: float | None,
    ) -> _Line:
        num_layers, num_stages = len(layer_costs), len(boundaries) - 1
        bounds = check_boundaries("boundaries", boundaries, num_layers, num_stages)
        (costs, extras), unit = to_integers(
            non_negative(layer_costs, "layer_costs", num_layers), edge_row(edges)
        )
        speeds: list[Exact] = [1] * num_stages
        if stage_speeds is not None:
            speeds = [Fraction(v) for v in positive(stage_speeds, "stage_speeds", num_stages)]
        (slack,) = non_negative([tolerance], "tolerance", 1)
        if (layer_memory is None) != (stage_memory_limit is None):
            raise BalanceError("layer_memory and stage_memory_limit only work together")
        weights, allowed = [0] * num_layers, None
        if layer_memory is not None and stage_memory_limit is not None:
            (weights, (allowed,)), _ = to_integers(
                non_negative(layer_memory, "layer_memory", num_layers),
                non_negative([stage_memory_limit], "stage_memory_limit", 1),
            )
        stage_extras = [0] * num_stages
        stage_extras[0] += extras[0]
        stage_extras[-1] += extras[1]
        loads = [
            _time(sum(costs[a:b]) + extra, speed)
            for (a, b), extra, speed in zip(pairwise(bounds), stage_extras, speeds, strict=True)
        ]
        grain = math.gcd(*costs, *stage_extras) or 1
        equal_speeds = all(speed == 1 for speed in speeds)
        return cls(costs, bounds, loads, speeds, Fraction(slack) / unit, min_layers, weights,
                   allowed, unit, grain, equal_speeds)  # fmt: skip

    def largest_time(self) -> float:
        return float(max(self.loads) * self.unit)

    def round_bound(self) -> int:
        """Exchanges + 1, exchanges bounded as the module's text says."""
        num_stages = len(self.loads)
        exchanges = math.comb(len(self.costs) + num_stages - 1, num_stages - 1)
        if self.equal_speeds:
            loads = [int(load) for load in self.loads]  # whole at speed 1
            drop = sum(load * load for load in loads) * num_stages - sum(loads) ** 2
            exchanges = min(exchanges, drop // (2 * num_stages * self.grain**2))
        return exchanges + 1

    def exchange_round(self) -> bool:
        """Every pair of neighbours once, even boundaries and then odd ones."""
        moved = False
        for parity in (0, 1):
            for left in range(parity, len(self.loads) - 1, 2):
                if self.loads[left] > self.loads[left + 1]:
                    moved |= self._exchange(left, left + 1)
                elif self.loads[left] < self.loads[left + 1]:
                    moved |= self._exchange(left + 1, left)
        return moved

    def _exchange(self, giver: int, taker: int) -> bool:
        layers = list(self._spare(giver, taker, self._free(taker)))
        count = layers_to_hand_over(
            self.loads[giver],
            self.loads[taker],
            self._costs(layers),
            speed=self.speeds[giver],
            neighbour_speed=self.speeds[taker],
            tolerance=self.tolerance,
        )
        if count:
            self._shift(giver, taker, layers[:count])
        return count > 0

    def relay_round(self) -> bool:
        """One sweep of offers to the right, then one to the left."""
        moved, last = False, len(self.loads) - 1
        for origin in range(last):
            moved |= self._relay(origin, 1)
        for origin in range(last, 0, -1):
            moved |= self._relay(origin, -1)
        return moved

    def _relay(self, origin: int, step: int) -> bool:
        """Offer layers from one rank in one direction; commit only if somebody keeps them."""
        ceiling = self.loads[origin] - self.tolerance
        given: list[list[int]] = []  # by the origin, then by every rank that passes layers on
        incoming, rank, squares = list[int](), origin, 0
        while True:
            layers = self._passable(rank, incoming, step)
            count = layers_to_relay(
                self.loads[rank],
                self._cost(incoming),
                ceiling,
                self._costs(layers),
                speed=self.speeds[rank],
            )
            if count is None or not self._has_room(rank, incoming, layers[:count]):
                return False
            squares += self._change_of_square(rank, incoming, layers[:count])
            if count == 0:
                break
            given.append(layers[:count])
            incoming, rank = given[-1], rank + step
            if not 0 <= rank < len(self.loads):
                return False
        if not given or squares >= 0:
            return False
        for hop, moved in enumerate(given):
            self._shift(origin + hop * step, origin + (hop + 1) * step, moved)
        assert self.bounds == sorted(self.bounds), "a rank gave layers it does not have"
        return True

    def _passable(self, rank: int, incoming: list[int], step: int) -> list[int]:
        """Layers a rank could pass on, from its far boundary inwards, the incoming ones last."""
        begin, end = self.bounds[rank], self.bounds[rank + 1]
        own = range(end - 1, begin - 1, -1) if step > 0 else range(begin, end)
        layers = [*own, *incoming]
        return layers[: max(len(layers) - self.min_layers, 0)]

    def _has_room(self, rank: int, incoming: list[int], given: list[int]) -> bool:
        free = self._free(rank)
        if free is None or not incoming:
            return True
        grows = sum(self.memory[n] for n in incoming) - sum(self.memory[n] for n in given)
        return grows <= max(free, 0)

    def _change_of_square(self, rank: int, incoming: list[int], given: list[int]) -> int:
        """Change of this rank's share of the sum of squares; any fall where speeds differ."""
        if not self.equal_speeds:
            return -1
        change = self._cost(incoming) - self._cost(given)
        return change * (2 * int(self.loads[rank]) + change)

    def _spare(self, giver: int, taker: int, free: int | None) -> Iterator[int]:
        """Layers that a rank may give, from the boundary inwards, as far as the taker has room."""
        for layer in self._passable(giver, [], taker - giver):
            if free is not None:
                free -= self.memory[layer]
                if free < 0:
                    return
            yield layer

    def _free(self, rank: int) -> int | None:
        if self.memory_limit is None:
            return None
        held = sum(self.memory[self.bounds[rank] : self.bounds[rank + 1]])
        return self.memory_limit - held

    def _costs(self, layers: Iterable[int]) -> Iterator[int]:
        return (self.costs[layer] for layer in layers)

    def _cost(self, layers: list[int]) -> int:
        return sum(self.costs[layer] for layer in layers)

    def _shift(self, giver: int, taker: int, layers: list[int]) -> None:
        """Move the boundary between two neighbours over the given layers."""
        if taker > giver:
            self.bounds[taker] -= len(layers)
        else:
            self.bounds[giver] += len(layers)
        cost = self._cost(layers)
        self.loads[giver] -= _time(cost, self.speeds[giver])
        self.loads[taker] += _time(cost, self.speeds[taker])


def _time(cost: Exact, speed: Exact) -> Exact:
    """Cost at a speed; keeps whole numbers whole where the speed is 1."""
    return cost if speed == 1 else cost / speed

"""Diffusion between real ranks comes to what the pure function says, over neighbours alone."""

import random
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist

from megatron_dynmo.balancers import diffusion
from megatron_dynmo.errors import BalanceError, PeerLost
from megatron_dynmo.neighbours import balance_with_neighbours
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@dataclass
class Case:
    """A split to begin from, by the number of layers on each rank."""

    costs: list[float]
    sizes: list[int]
    extras: tuple[float, float] = (0.0, 0.0)
    speeds: list[float] | None = None
    memory: list[float] | None = None
    limit: float | None = None
    common: dict = field(default_factory=dict)

    @property
    def boundaries(self) -> list[int]:
        return [0, *accumulate(self.sizes)]

    def pure(self) -> dict:
        result = diffusion(
            self.costs, self.boundaries, first_stage_extra=self.extras[0],
            last_stage_extra=self.extras[1], stage_speeds=self.speeds, layer_memory=self.memory,
            stage_memory_limit=self.limit, **self.common,
        )  # fmt: skip
        names = ("boundaries", "rounds", "history", "converged")
        return {name: getattr(result, name) for name in names}

    def on(self, rank: int, world_size: int) -> dict:
        mine = slice(*self.boundaries[rank : rank + 2])
        extra = self.extras[0] * (rank == 0) + self.extras[1] * (rank == world_size - 1)
        result = balance_with_neighbours(
            self.costs[mine], dist.group.WORLD, CPU, extra=extra,
            speed=1.0 if self.speeds is None else self.speeds[rank],
            layer_memory=None if self.memory is None else self.memory[mine],
            memory_limit=self.limit, timeout_s=60, **self.common,
        )  # fmt: skip
        return asdict(result)


def cases_for(world_size: int) -> list[Case]:
    rng = random.Random(world_size)
    by_hand = {
        2: [
            Case([1.0] * 8, [8, 0]),
            Case([10.0, 1.0, 1.0, 1.0], [4, 0], common={"min_layers": 0}),
            Case([0.0, 0.0], [1, 1]),
            Case([1.0] * 6, [3, 3], extras=(0.0, 2.0)),
            Case([1.0] * 9, [1, 8], memory=[3.0] * 9, limit=9.0),
            Case([1.0] * 9, [1, 8], common={"tolerance": 3.0}),
        ],
        4: [
            Case([1.0] * 14, [5, 4, 3, 2]),  # a slope: every pair is content, relays level it
            Case([1.0] * 14, [5, 4, 3, 2], common={"relay": False}),
            Case([1.0] * 14, [2, 3, 4, 5]),
            Case([1.0] * 12, [12, 0, 0, 0], common={"min_layers": 0}),
            Case([1.0] * 12, [12, 0, 0, 0], common={"max_rounds": 1, "min_layers": 0}),
            Case([1.0] * 12, [12, 0, 0, 0], common={"max_rounds": 0, "min_layers": 0}),
            Case([1.0] * 14, [5, 4, 3, 2], memory=[1.0] * 14, limit=4.0),
            Case([1.0] * 12, [3, 3, 3, 3], speeds=[1.0, 0.25, 1.0, 1.0]),
            Case([1.0] * 11 + [40.0], [3, 3, 3, 3]),
        ],
    }[world_size]
    cases = list(by_hand)
    for _ in range(40):
        num_layers = rng.randint(world_size, 6 * world_size)
        draw = rng.choice((lambda: float(rng.randint(0, 9)), rng.random))
        inner = sorted(rng.choices(range(num_layers + 1), k=world_size - 1))
        bounds = [0, *inner, num_layers]
        memory = limit = None
        if rng.random() < 0.3:
            memory = [float(rng.randint(0, 9)) for _ in range(num_layers)]
            limit = sum(memory) * rng.uniform(0.3, 1.0)
        cases.append(
            Case(
                [draw() for _ in range(num_layers)],
                [b - a for a, b in pairwise(bounds)],
                (rng.choice((0.0, draw())), rng.choice((0.0, 3 * draw()))),
                rng.choice((None, [rng.choice((0.3, 0.5, 1.0)) for _ in range(world_size)])),
                memory,
                limit,
                {"min_layers": rng.randint(0, 1), "tolerance": rng.choice((0.0, 0.1))},
            )
        )
    return cases


def _all_cases(rank: int, world_size: int) -> list[dict]:
    return [case.on(rank, world_size) for case in cases_for(world_size)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_comes_to_what_the_pure_function_says(world_size):
    cases = cases_for(world_size)
    expected = [case.pure() for case in cases]
    assert any(result["rounds"] >= world_size for result in expected)
    assert sum(r["boundaries"] != c.boundaries for c, r in zip(cases, expected, strict=True)) > 20
    for results in run_ranks(_all_cases, world_size):
        for case, found, wanted in zip(cases, results, expected, strict=True):
            assert found == wanted, case


def _watched(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    """Whom this rank sends to, and which collectives it takes part in."""
    peers, collectives = [], []

    def watch(name, note):
        original = getattr(dist, name)

        def wrapper(*args, **kwargs):
            note(*args)
            return original(*args, **kwargs)

        setattr(dist, name, wrapper)

    watch("isend", lambda tensor, to, *rest: peers.append(to))
    for name in (
        "all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "barrier",
        "broadcast", "broadcast_object_list", "gather", "reduce", "scatter", "all_to_all",
    ):  # fmt: skip
        watch(name, lambda *args, name=name: collectives.append(name))
    cases_for(world_size)[0].on(rank, world_size)
    return sorted(set(peers)), collectives


def test_ranks_talk_to_their_neighbours_and_agree_once_at_the_end():
    for rank, (peers, collectives) in enumerate(run_ranks(_watched, 4)):
        assert peers == [peer for peer in (rank - 1, rank + 1) if 0 <= peer < 4]
        assert collectives == ["all_gather"]


def _one_is_wrong(rank: int, world_size: int) -> str:
    costs = [1.0, -2.0] if rank == 2 else [1.0, 2.0]
    with pytest.raises(BalanceError) as raised:
        balance_with_neighbours(costs, dist.group.WORLD, CPU, timeout_s=60)
    # The links are in order: another balance goes well.
    assert balance_with_neighbours([1.0], dist.group.WORLD, CPU).boundaries == [0, 1, 2, 3, 4]
    return str(raised.value)


def test_bad_input_of_one_rank_is_an_error_on_all():
    for text in run_ranks(_one_is_wrong, 4):
        assert text.startswith("rank 2: layer_costs[1] is -2.0")


def _one_stays_away(rank: int, world_size: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(PeerLost) as raised:
        balance_with_neighbours([1.0], dist.group.WORLD, CPU, timeout_s=2)
    return str(raised.value)


def test_a_neighbour_that_does_not_answer_is_an_error():
    assert "pp_rank 1" in run_ranks(_one_stays_away, 2)[0]


def _alone(rank: int, world_size: int) -> list[int]:
    return balance_with_neighbours([1.0, 2.0], dist.group.WORLD, CPU).boundaries


def test_a_single_rank_keeps_everything():
    assert run_ranks(_alone, 1) == [[0, 2]]

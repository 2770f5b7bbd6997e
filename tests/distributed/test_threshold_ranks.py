"""The global threshold over ranks that hold different parts, one of them nothing at times."""

import pytest

from tests.ranks import run_ranks

COUNTS = (0, 1, 700, 1999, 2000)


def select(rank, world_size, shares):
    """Select from this rank's share of the same 2000 values; returns the indices selected."""
    import torch
    import torch.distributed as dist

    from megatron_dynmo.dynamics.pruning.threshold import Piece, smallest

    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(2000, generator=generator) * 4).round() / 4
    owner = torch.arange(2000) % 10
    mine = torch.isin(owner, torch.tensor(shares[rank])).nonzero().flatten()
    pieces = [Piece(values[part], lambda at, part=part: part[at]) for part in mine.chunk(3)]
    found = []
    for count in COUNTS:
        bound = smallest(
            pieces,
            count,
            num_indices=2000,
            dtype=torch.float32,
            device=torch.device("cpu"),
            group=dist.group.WORLD,
        )
        selected = [part[bound.selected(p)] for p, part in zip(pieces, mine.chunk(3), strict=True)]
        found.append(torch.cat(selected).tolist() if selected else [])
    return found


@pytest.mark.parametrize("shares", [([0, 3, 5, 9], [1, 2, 4, 6, 7, 8]), (list(range(10)), [])])
def test_the_same_elements_however_they_are_spread(shares):
    by_rank = run_ranks(select, 2, shares)
    alone = run_ranks(select, 1, [list(range(10))])[0]
    for number, count in enumerate(COUNTS):
        joint = sorted(by_rank[0][number] + by_rank[1][number])
        assert joint == sorted(alone[number])
        assert len(joint) == count

"""The global threshold against a full sort."""

import pytest
import torch

from megatron_dynmo.dynamics.pruning.threshold import Piece, smallest

SIZES = (1000, 1, 0, 333)
TOTAL = sum(SIZES)


def weights(kind, dtype):
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(TOTAL, generator=generator, dtype=torch.float64)
    if kind == "tied":
        values = (values * 2).round() / 8
    if kind == "zero":
        values = values * 0.0
    if kind == "extreme":
        values[::5] = float("inf")
        values[1::5] = -torch.finfo(dtype).tiny / 4
        values[2::5] = -0.0
    return values.to(dtype)


def pieces_of(values, order):
    """Cut the values into pieces; element i has the index order[i]."""
    return [
        Piece(part, lambda at, index=index: index[at])
        for part, index in zip(values.split(SIZES), order.split(SIZES), strict=True)
    ]


def by_sorting(values, order, count):
    """Which elements the first `count` are by magnitude, then index."""
    keys = sorted(range(TOTAL), key=lambda i: (abs(float(values[i])), int(order[i])))
    selected = torch.zeros(TOTAL, dtype=torch.bool)
    selected[keys[:count]] = True
    return selected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", ["random", "tied", "zero", "extreme"])
def test_equals_a_full_sort(kind, dtype):
    values = weights(kind, dtype)
    order = torch.randperm(TOTAL, generator=torch.Generator().manual_seed(3)) * 10**12
    for count in (0, 1, 500, TOTAL - 1, TOTAL):
        pieces = pieces_of(values, order)
        bound = smallest(
            pieces, count, num_indices=TOTAL * 10**12, dtype=dtype, device=values.device
        )
        found = torch.cat([bound.selected(piece) for piece in pieces])
        assert torch.equal(found, by_sorting(values, order, count)), (kind, dtype, count)


def test_the_cut_does_not_matter():
    values, order = weights("tied", torch.float32), torch.arange(TOTAL)
    arguments = {"num_indices": TOTAL, "dtype": torch.float32, "device": values.device}
    whole = smallest([Piece(values, lambda at: at)], 700, **arguments)
    assert smallest(pieces_of(values, order), 700, **arguments) == whole


def test_too_many_is_an_error():
    with pytest.raises(AssertionError, match="5 were asked for, 4"):
        smallest(
            [Piece(torch.ones(4), lambda at: at)],
            5,
            num_indices=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

"""The checksum that guards moves sees every bit, every position and the order."""

import random

import pytest
import torch

from megatron_dynmo import checksum as module
from megatron_dynmo.checksum import checksum

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65)


@pytest.fixture(autouse=True, params=["host", "device"])
def where(request, monkeypatch):
    """Check both ways to compute it; the one for GPUs runs on a CPU as well."""
    if request.param == "device":
        monkeypatch.setattr(module, "_on_host", module._on_device)


def noise(size: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


@pytest.mark.parametrize("size", SIZES)
def test_every_single_bit_counts(size):
    data = noise(size)
    seen = {checksum([data])}
    for position in range(size):
        for bit in range(8):
            flipped = data.clone()
            flipped[position] ^= 1 << bit
            seen.add(checksum([flipped]))
    assert len(seen) == 8 * size + 1


@pytest.mark.parametrize("size", [8, 9, 64, 67])
def test_every_swap_of_two_unequal_bytes_or_words_counts(size):
    data = torch.arange(1, size + 1, dtype=torch.uint8)
    reference = checksum([data])
    for i in range(size):
        for j in range(i):
            swapped = data.clone()
            swapped[i], swapped[j] = data[j], data[i]
            assert checksum([swapped]) != reference, (i, j)
    words = torch.arange(1, size + 1, dtype=torch.int32)
    reference = checksum([words])
    for i in range(size):
        for j in range(i):
            swapped = words.clone()
            swapped[i], swapped[j] = words[j], words[i]
            assert checksum([swapped]) != reference, (i, j)


def test_random_damage_never_passes():
    rng = random.Random(5)
    data = noise(1024)
    reference = checksum([data])
    for _ in range(500):
        damaged = data.clone()
        for _ in range(rng.randint(1, 5)):
            damaged[rng.randrange(1024)] = rng.randrange(256)
        assert (checksum([damaged]) == reference) == torch.equal(damaged, data)


def test_order_and_cuts_of_the_list_count():
    a, b = noise(16, 1), noise(16, 2)
    assert len({checksum(x) for x in ([a, b], [b, a], [torch.cat([a, b])], [a], [a, a])}) == 5


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64,
    ],
    ids=str,
)  # fmt: skip
def test_only_bytes_count_whatever_the_dtype(dtype):
    raw = noise(16 * 8)
    typed = raw.clone().view(dtype)
    damaged = raw.clone()
    damaged[-1] ^= 128
    assert checksum([typed]) != checksum([damaged.view(dtype)])
    assert checksum([typed.clone()]) == checksum([typed])


def test_values_that_compare_equal_are_told_apart():
    assert checksum([torch.tensor([0.0])]) != checksum([torch.tensor([-0.0])])
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum([quiet]) != checksum([other])


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("size", [1, 4, 5, 40])
def test_where_a_view_begins_in_its_storage_does_not_matter(offset, size):
    data = noise(64)
    view = data[offset : offset + size]
    assert checksum([view]) == checksum([view.clone()])


def test_strides_do_not_matter():
    wide = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    for view in (wide.t(), wide[::2], wide[:, 3], wide[1:, ::3]):
        assert checksum([view]) == checksum([view.contiguous()])


def test_special_shapes():
    assert checksum([]) == 0
    assert checksum([torch.tensor(2.5)]) == checksum([torch.tensor([2.5])])
    assert checksum([torch.empty(0), torch.empty(0, 3)]) == 0
    assert checksum([torch.tensor([True, False, True])]) != checksum([torch.tensor([True] * 3)])
    assert checksum([torch.nn.Parameter(torch.ones(3))]) == checksum([torch.ones(3)])


def test_blocks_of_a_long_tensor_join_seamlessly(monkeypatch):
    data = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    whole = checksum([data])
    for block in (1, 7, 64, 999, 1000):
        monkeypatch.setattr(module, "_BLOCK", block)
        assert checksum([data]) == whole


def test_it_is_a_signed_64_bit_number_that_json_can_carry():
    generator = torch.Generator().manual_seed(9)
    for _ in range(200):
        value = checksum([torch.randn(33, generator=generator).to(torch.float64)])
        assert -(2**63) <= value < 2**63


def test_tensors_are_only_read():
    data = noise(41)
    before = data.clone()
    checksum([data[1:], data])
    assert torch.equal(data, before)

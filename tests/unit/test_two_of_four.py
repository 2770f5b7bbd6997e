import itertools

import pytest
import torch

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.dynamics.pruning import kernels, two_of_four
from megatron_dynmo.dynamics.pruning.sparse_linear import Products, compress
from megatron_dynmo.dynamics.pruning.two_of_four import ALWAYS, CompressedForward, may_go
from megatron_dynmo.errors import ConfigError

CPU = torch.device("cpu")
SHAPES = [(8, 8)] * 4


def by_hand(values, places):
    """Positions of those that two of their group are larger than, the later of equal ones."""
    found = []
    for at, (value, place) in enumerate(zip(values, places, strict=True)):
        larger = [
            other
            for other, there in zip(values, places, strict=True)
            if there // 4 == place // 4 and (abs(other), there) > (abs(value), place)
        ]
        if len(larger) >= 2:
            found.append(at)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_only_what_two_of_its_group_exceed_may_go(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(64, generator=generator)
    values[torch.rand(64, generator=generator) < 0.4] = 0.5  # ties
    values[torch.rand(64, generator=generator) < 0.2] *= 0
    places = (torch.rand(64, generator=generator) < 0.8).nonzero().flatten().to(torch.int32)
    values = values.to(dtype)[: len(places)]
    found = may_go(values, places)
    assert found.tolist() == by_hand(values.tolist(), places.tolist())
    left = torch.ones(len(places), dtype=torch.bool)
    left[found] = False
    assert max((places[left] // 4).unique(return_counts=True)[1]) == 2
    assert len(may_go(values[left], places[left])) == 0, "two of a group stay"


def test_nothing_may_go_of_nothing():
    assert len(may_go(torch.empty(0), torch.empty(0, dtype=torch.int32))) == 0


def test_a_matrix_is_compressed_when_half_of_it_is_left():
    assert CompressedForward(0.7).products(0.51) == Products()
    assert CompressedForward(0.7).products(0.5) == Products(compressed=True)
    assert CompressedForward(1.0).products(0.5) == Products()
    assert CompressedForward(0.7).times(0.5) == (0.7, 1.0, 1.0)
    assert CompressedForward(0.7).times(0.6) == (1.0, 1.0, 1.0)


def test_without_sparse_tensor_cores_products_stay_dense(monkeypatch):
    assert not two_of_four.is_supported(64, 64, torch.bfloat16, CPU)
    assert two_of_four.measure(64, 64, 8, 2, torch.bfloat16, CPU) == CompressedForward()
    demanded = kernels.Kernels("2:4", "sparse", SHAPES, 8)
    with pytest.raises(ConfigError, match=r"you ask for 2:4 products.* torch\.bfloat16 on cpu"):
        demanded.begin(torch.bfloat16, CPU, has_pruned=False)
    measured = kernels.Kernels("2:4", "auto", SHAPES, 8)
    measured.restore({name: [0.6] for name in kernels.MATRICES})
    with pytest.raises(ConfigError, match=r"the checkpoint runs 2:4.*--dynmo-prune-compute dense"):
        measured.begin(torch.bfloat16, CPU, has_pruned=True)
    demanded = kernels.Kernels("any", "sparse", SHAPES, 8)
    with pytest.raises(ConfigError, match=r"you ask for sparse products.* torch\.bfloat16"):
        demanded.begin(torch.bfloat16, CPU, has_pruned=False)
    demanded.begin(torch.float32, CPU, has_pruned=False)
    with pytest.raises(RuntimeError, match=r"2:4 products of torch\.float32 are not exact"):
        compress(torch.ones(64, 64))
    assert kernels.Kernels("2:4", "dense", SHAPES, 8).of(0) == CompressedForward()
    assert kernels.Kernels("2:4", "sparse", SHAPES, 8).of(0) == ALWAYS


def test_what_a_flag_demands_promises_no_time_but_less_work():
    demanded = kernels.Kernels("any", "sparse", SHAPES, 8)
    assert demanded.times(0, 0.1) == (1.0, 1.0, 1.0) and demanded.work(0, 0.1) == (0.1, 0.1, 0.1)
    demanded = kernels.Kernels("2:4", "sparse", SHAPES, 8)
    assert demanded.times(0, 0.5) == (1.0, 1.0, 1.0) and demanded.work(0, 0.5) == (0.5, 1.0, 1.0)
    measured = kernels.Kernels("2:4", "auto", SHAPES, 8)
    measured.restore({name: [0.6] for name in kernels.MATRICES})
    assert measured.times(0, 0.5) == (0.6, 1.0, 1.0)


def test_a_long_micro_batch_is_measured_in_parts(monkeypatch):
    class Counting:
        def t(self):
            return self

        def __rmatmul__(self, x):
            multiplied.append(len(x))
            return x

    multiplied = []
    monkeypatch.setattr(two_of_four, "compress", lambda weight: Counting())
    monkeypatch.setattr(two_of_four, "time_ratio", lambda run, device: run(True) is None or 0.5)
    found = two_of_four.measure(8, 8, 2500, 2, torch.bfloat16, CPU)
    assert found == CompressedForward(0.5) and multiplied == [1024] * 6


def test_rows_must_be_whole_groups():
    with pytest.raises(ConfigError, match="linear_fc2 has rows of 6 weights"):
        kernels.Kernels("2:4", "auto", [*SHAPES[:3], (8, 6)], 8)


def test_what_was_measured_is_taken_up():
    one = kernels.Kernels("2:4", "auto", SHAPES, 8)
    assert one.state() is None and one.of(1) == CompressedForward()
    state = {name: [0.5 + at / 10] for at, name in enumerate(kernels.MATRICES)}
    one.restore(state)
    assert one.state() == state and one.of(1) == CompressedForward(0.6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"prune": "neuron", "prune_final": 0.5},
            "no effect with --dynmo-prune neuron, only with magnitude",
        ),
        ({"prune": "magnitude"}, "--dynmo-prune-final is 0.9: give 0.5"),
        ({}, "no effect without --dynmo-prune"),
    ],
)
def test_settings_that_leave_no_two_of_four_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        DynMoConfig(prune_pattern="2:4", **settings)


def test_a_forced_compressed_product_multiplies_what_it_is_given(monkeypatch):
    """The kernel itself needs a GPU (tests/gpu); here its place in the layer is tested."""
    from megatron_dynmo.dynamics.pruning import sparse_linear

    monkeypatch.setattr(sparse_linear, "compress", lambda dense: 2 * dense)
    places = torch.tensor([4 * group + at for group, at in itertools.product(range(4), (0, 3))])
    pattern = sparse_linear.Pattern(places.to(torch.int32), 2, 8)
    values = torch.randn(8, requires_grad=True)
    x = torch.randn(3, 8, requires_grad=True)
    y = sparse_linear.sparse_linear(x, values, pattern, Products(compressed=True))
    dense = pattern.dense(values.detach())
    assert torch.equal(y, x.detach() @ (2 * dense).t()), "the forward product takes it"
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2) @ dense), "the backward ones do not"
    assert torch.equal(values.grad, (torch.ones(2, 3) @ x.detach()).view(-1)[places])

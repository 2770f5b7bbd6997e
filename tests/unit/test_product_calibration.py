import torch

from megatron_dynmo.dynamics.pruning.product_calibration import Crossover, crossover, is_supported
from megatron_dynmo.dynamics.pruning.sparse_linear import Products

CPU = torch.device("cpu")
ALL = Products(True, True, True)


def test_a_product_is_sparse_up_to_the_measured_density_only():
    limits = Crossover(forward=0.1, input_grad=0.0, weight_grad=0.05)
    assert limits.products(0.1) == Products(forward=True)
    assert limits.products(0.04) == Products(forward=True, weight_grad=True)
    assert limits.times(0.05) == (0.5, 1.0, 1.0)
    assert limits.times(0.2) == (1.0, 1.0, 1.0)


def test_a_product_that_torch_has_no_sparse_kernel_of_never_runs_sparse():
    assert not is_supported(torch.bfloat16, CPU, ALL), "there is no sampled product of bf16"
    assert crossover(16, 8, 4, torch.bfloat16, CPU).weight_grad == 0


def test_measuring_leaves_the_random_streams_alone():
    assert is_supported(torch.float32, CPU, ALL)
    before = torch.random.get_rng_state()
    limits = crossover(16, 8, 4, torch.float32, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(0 <= limit <= 0.35 for limit in limits)

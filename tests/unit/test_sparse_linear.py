"""The sparse linear map against a dense masked reference."""

import itertools

import pytest
import torch

from megatron_dynmo.dynamics.pruning.sparse_linear import (
    Pattern,
    Products,
    SequenceParts,
    sparse_linear,
)

WAYS = [Products(*way) for way in itertools.product([False, True], repeat=3)]


def problem(dtype, density=0.3, rows=12, columns=7):
    generator = torch.Generator().manual_seed(5)
    kept = torch.rand(rows, columns, generator=generator) < density
    kept[3] = False  # a row and a column without any weight
    kept[:, 2] = False
    weight = torch.randn(rows, columns, generator=generator, dtype=dtype) * kept
    inputs = torch.randn(2, 5, columns, generator=generator, dtype=dtype)
    pattern = Pattern(kept.flatten().nonzero().flatten().to(torch.int32), rows, columns)
    return inputs, weight, kept, pattern


@pytest.mark.parametrize("products", WAYS)
def test_gradients_in_float64(products):
    inputs, weight, kept, pattern = problem(torch.float64)
    values = weight[kept].view(1, -1).requires_grad_()
    inputs.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, v: sparse_linear(x, v, pattern, products), (inputs, values)
    )


@pytest.mark.parametrize("products", WAYS)
@pytest.mark.parametrize("density", [0.3, 0.0, 1.0])
def test_equals_the_masked_dense_map(products, density):
    inputs, weight, kept, pattern = problem(torch.float32, density)
    values = weight[kept].view(1, -1).requires_grad_()
    inputs.requires_grad_()
    result = sparse_linear(inputs, values, pattern, products)
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
    result.backward(upstream)

    dense_inputs = inputs.detach().clone().requires_grad_()
    dense_weight = weight.clone().requires_grad_()
    expected = dense_inputs @ (dense_weight * kept).t()
    expected.backward(upstream)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(inputs.grad, dense_inputs.grad)
    torch.testing.assert_close(values.grad.flatten(), dense_weight.grad[kept])
    assert result.is_contiguous()


def test_only_wanted_gradients_are_computed():
    inputs, weight, kept, pattern = problem(torch.float32)
    values = weight[kept].view(1, -1)
    result = sparse_linear(inputs.requires_grad_(), values, pattern, Products(True, True, True))
    result.sum().backward()
    assert inputs.grad is not None and values.grad is None


@pytest.mark.parametrize("products", WAYS)
def test_of_a_divided_sequence_only_the_own_part_is_kept(products):
    """Two ranks that hold the same: gathering doubles, and the sum of both halves comes back."""
    inputs, weight, kept, pattern = problem(torch.float64)
    values = weight[kept].view(1, -1).requires_grad_()
    part = inputs[:1].requires_grad_()
    parts = SequenceParts(lambda x: torch.cat([x, x]), lambda g: g[:1] + g[1:])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = sparse_linear(part, values, pattern, products, parts=parts)
    assert max(len(t) for t in saved if t.dim() == 3) == 1
    (result[:1] * 2 + result[1:]).sum().backward()
    found = part.grad, values.grad

    again, own = (t.detach().clone().requires_grad_() for t in (part, values))
    whole = sparse_linear(torch.cat([again, again]), own, pattern, products)
    (whole[:1] * 2 + whole[1:]).sum().backward()
    torch.testing.assert_close(found, (again.grad, own.grad))

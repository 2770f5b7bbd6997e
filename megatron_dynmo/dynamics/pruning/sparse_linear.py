"""A linear map whose weight is kept as the vector of its non-zeros.

Tier: torch. The vector is the parameter: gradient, master copy and moments shrink with it, and a
removed weight cannot come back, because there is none. Each of the three products of a training
step runs on sparse kernels or on a dense matrix filled from the vector, whichever is faster there;
`product_calibration` measures which.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Products(NamedTuple):
    """Which products run on sparse kernels; the others fill a dense matrix first.

    Attributes:
        forward: y = x W^T, as a product with W in CSR.
        input_grad: dx = dy W, as a product with W^T in CSR.
        weight_grad: dW = dy^T x, sampled at the non-zeros.
        compressed: y = x W^T with the dense W compressed two of four, for sparse tensor cores.
    """

    forward: bool = False
    input_grad: bool = False
    weight_grad: bool = False
    compressed: bool = False


class SequenceParts(NamedTuple):
    """How a sequence that lies in parts on ranks is brought together; the parts are what is kept.

    Attributes:
        gather: [n / ranks, ...] of each rank -> [n, ...]; a collective of those ranks.
        scatter_sum: [n, ...] of each -> the rank's part of their sum; the same.
    """

    gather: Callable[[torch.Tensor], torch.Tensor]
    scatter_sum: Callable[[torch.Tensor], torch.Tensor]


class Pattern:
    """Where the non-zeros of a matrix are.

    Args:
        index: int32 `[nnz]`, ascending positions in the flattened matrix; kept, not copied.
        num_rows: rows of the matrix (outputs).
        num_columns: its columns (inputs).
    """

    def __init__(self, index: torch.Tensor, num_rows: int, num_columns: int) -> None:
        self.shape = (num_rows, num_columns)
        self.index = index

    @functools.cached_property
    def _csr(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row starts `[rows + 1]` and columns `[nnz]`, int32: what the kernels take unconverted."""
        rows, columns = self.shape
        return _starts(self.index // columns, rows), self.index % columns

    @functools.cached_property
    def _transposed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of the transposed matrix, and where its values are in the vector."""
        rows, columns = self.shape
        row, column = self.index // columns, self.index % columns
        order = torch.argsort(column * rows + row).to(torch.int32)
        return _starts(column[order], columns), row[order], order

    def csr(self, values: torch.Tensor) -> torch.Tensor:
        """The matrix `[rows, columns]` in CSR; shares the values `[nnz]`."""
        return _csr_tensor(*self._csr, values, self.shape)

    def csr_transposed(self, values: torch.Tensor) -> torch.Tensor:
        """The transposed matrix `[columns, rows]` in CSR, a new tensor."""
        starts, rows, order = self._transposed
        return _csr_tensor(starts, rows, values[order], self.shape[::-1])

    def dense(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The matrix `[rows, columns]`, zeros where nothing is kept.

        Args:
            values: the non-zeros, of any shape.
            out: an earlier answer of the same pattern, to be filled again; else a new tensor.
        """
        if out is None:
            out = values.new_zeros(self.shape)
        out.view(-1)[self.index] = values.view(-1)
        return out


def sparse_linear(
    inputs: torch.Tensor,
    values: torch.Tensor,
    pattern: Pattern,
    products: Products,
    dense: torch.Tensor | None = None,
    compressed: torch.Tensor | None = None,
    parts: SequenceParts | None = None,
) -> torch.Tensor:
    """Compute x W^T for a weight kept as its non-zeros; differentiable in both.

    Args:
        inputs: `[..., columns]`.
        values: same dtype, the non-zeros in the order of the pattern, of any shape.
        pattern: their places.
        products: how to compute.
        dense: the matrix `[rows, columns]` with these values for the products that run dense; must
            stay as it is until the backward is done. Without it one is made when it is needed.
        compressed: what `compress` made of it, likewise.
        parts: with sequence parallelism the inputs are this rank's part of x; the whole is gathered
            again in the backward instead of being kept.

    Returns:
        `[..., rows]`, a new contiguous tensor.

    Collective:
        With `parts`, forward and backward: the ranks that share the sequence.
    """
    if dense is None and not (products.forward and products.input_grad):
        dense = pattern.dense(values.detach())
    if compressed is None and products.compressed:
        assert dense is not None
        compressed = compress(dense)
    both = dense, compressed
    result: torch.Tensor = _SparseLinear.apply(inputs, values, pattern, products, both, parts)
    return result


def compress(dense: torch.Tensor) -> torch.Tensor:
    """Write a matrix with two non-zeros of four in the form that sparse tensor cores multiply.

    Args:
        dense: `[rows, columns]` on a CUDA device, bf16 or fp16.

    Returns:
        A tensor of the same shape and about nine sixteenths of the memory; x @ it.t() works.

    Raises:
        RuntimeError: torch has no such product for the device, the dtype or the size.
    """
    if dense.dtype not in (torch.bfloat16, torch.float16):
        # torch would compute with TF32: other numbers than the dense product, unasked for.
        raise RuntimeError(f"2:4 products of {dense.dtype} are not exact")
    return torch.sparse.to_sparse_semi_structured(dense)


def forward_product(
    x: torch.Tensor, values: torch.Tensor, pattern: Pattern, dense: torch.Tensor | None
) -> torch.Tensor:
    """Compute x W^T for x `[n, columns]`, as CSR unless the whole W is given; `[n, rows]`."""
    if dense is not None:
        return x @ dense.t()
    return (pattern.csr(values) @ x.t().contiguous()).t().contiguous()


def input_gradient(
    dy: torch.Tensor, values: torch.Tensor, pattern: Pattern, dense: torch.Tensor | None
) -> torch.Tensor:
    """Compute dy W, sparse unless the dense W is given.

    Args:
        dy: `[n, rows]`; for the sparse product, as a transposed contiguous tensor.
        values: the non-zeros, `[nnz]`.
        pattern: their places.
        dense: the matrix.

    Returns:
        `[n, columns]`, a new contiguous tensor.
    """
    if dense is not None:
        return dy @ dense
    return (pattern.csr_transposed(values) @ dy.t()).t().contiguous()


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, values: torch.Tensor, pattern: Pattern, is_sparse: bool
) -> torch.Tensor:
    """Compute dy^T x at the non-zeros.

    Args:
        dy: as in `input_gradient`.
        x: `[n, columns]`.
        values: the non-zeros, `[nnz]`.
        pattern: their places.
        is_sparse: whether to compute nothing but those.

    Returns:
        `[nnz]`, a new tensor.
    """
    if not is_sparse:
        return (dy.t() @ x).view(-1)[pattern.index]
    # beta = 0 leaves the values out.
    return torch.sparse.sampled_addmm(pattern.csr(values), dy.t(), x, beta=0.0).values()


def transposed_layout(dy: torch.Tensor) -> torch.Tensor:
    """The same matrix, laid out by columns as the sparse kernels read it."""
    return dy.t().contiguous().t()


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        values: torch.Tensor,
        pattern: Pattern,
        products: Products,
        matrices: tuple[torch.Tensor | None, torch.Tensor | None],
        parts: SequenceParts | None,
    ) -> torch.Tensor:
        dense, compressed = matrices
        ctx.save_for_backward(inputs, values)
        ctx.pattern, ctx.products, ctx.dense, ctx.parts = pattern, products, dense, parts
        if parts is not None:
            inputs = parts.gather(inputs)
        x = inputs.reshape(-1, inputs.shape[-1])
        whole = compressed if products.compressed else dense
        y = forward_product(x, values.view(-1), pattern, None if products.forward else whole)
        return y.view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        inputs, values = ctx.saved_tensors
        pattern, products, parts = ctx.pattern, ctx.products, ctx.parts
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        by_columns = dy
        if products.input_grad or products.weight_grad:
            by_columns = transposed_layout(dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dense, own = (None, by_columns) if products.input_grad else (ctx.dense, dy)
            dx = input_gradient(own, values.view(-1), pattern, dense)
            dx = dx.view(*grads[0].shape[:-1], -1)
            if parts is not None:
                dx = parts.scatter_sum(dx)
        if ctx.needs_input_grad[1]:
            if parts is not None:
                inputs = parts.gather(inputs)
            x = inputs.reshape(-1, inputs.shape[-1])
            own = by_columns if products.weight_grad else dy
            dw = weight_gradient(own, x, values.view(-1), pattern, products.weight_grad)
            dw = dw.view(values.shape)
        return dx, dw, None, None, None, None


def _starts(lines: torch.Tensor, num_lines: int) -> torch.Tensor:
    """Where each line begins among ascending line numbers; int32 `[num_lines + 1]`."""
    starts = torch.zeros(num_lines + 1, dtype=torch.int32, device=lines.device)
    starts[1:] = torch.bincount(lines, minlength=num_lines).cumsum(0)
    return starts


def _csr_tensor(
    starts: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    _warn_never_again()
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


@functools.cache
def _warn_never_again() -> None:
    """Let torch say once, unheard, that CSR tensors are a beta feature."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        starts = torch.zeros(1, dtype=torch.int32)
        torch.sparse_csr_tensor(starts, starts[:0], torch.zeros(0), (0, 1), check_invariants=False)

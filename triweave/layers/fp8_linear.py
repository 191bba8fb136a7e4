"""The column- and the row-parallel product in fp8: what `linear.py` does, with operands of one byte an element.

Slices travel in 16 bits and each piece is cast as it arrives, with its own scale. What backward needs of an input is
its cast by columns; where slices travel it is the slice, as without fp8, and the whole is cast once it is there again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triweave.gradients import add_to_main_grad
from triweave.layers.fp8 import (
    FAST_GRADIENTS,
    GRADIENTS,
    VALUES,
    Fp8Matrix,
    add_weight_gradient,
    amax_of,
    both_ways,
    by_columns,
    by_rows,
    multiply,
    weight_by_columns,
    weight_by_rows,
)
from triweave.layers.products import slices
from triweave.layers.tensor_parallel import TensorParallel
from triweave.transport.interface import Gathering, Scattering, Transport


def multiply_columns_in_fp8(x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """`[seq/tp, batch, in]` or `[seq, batch, in]` to `[seq, batch, out/tp]`: see `ColumnParallelLinear`."""
    product: Tensor = _Column.apply(x, weight, bias, tp, torch.is_grad_enabled())
    return product


def multiply_rows_in_fp8(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """`[seq, batch, in/tp]` to `[seq/tp, batch, out]` or `[seq, batch, out]`: see `RowParallelLinear`."""
    shared = _Shared()
    x = _RowWeight.apply(x, weight, tp, shared, torch.is_grad_enabled())
    total: Tensor = _Row.apply(x, weight, tp, shared)
    return total


class _Column(torch.autograd.Function):
    """The product, its input gradient now, its weight gradient now or in the schedule's weight half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel, keep: bool) -> Tensor:
        ctx.weight, ctx.bias, ctx.tp, ctx.inverse_scale, ctx.amax = weight, bias, tp, None, None
        matrix = weight_by_rows(weight)
        if tp.gathers:
            gathering = tp.transport.gather(x, whole=tp.keep_gathered, other=weight.shape[0])
            y, ctx.amax = _multiply_gathered(gathering, matrix, VALUES, fast=True)
            gathered = gathering.finish()
            ctx.save_for_backward(gathered if tp.keep_gathered else x)
        else:
            rows = _cast_and_keep(ctx, x, keep)
            y = multiply(rows, matrix, x.dtype, fast=True).unflatten(0, x.shape[:-1])
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None, None, None]:
        # Without the graph that made it, see linear.py.
        kept = ctx.saved_tensors[0].detach()
        weight, bias, tp, inverse_scale, amax = ctx.weight, ctx.bias, ctx.tp, ctx.inverse_scale, ctx.amax
        submit = tp.weight_gradients.submit
        rows, columns = both_ways(grad_y, GRADIENTS)
        of_bias = None if bias is None else grad_y.flatten(0, -2).sum(0, dtype=torch.float32)
        gathers = tp.gathers and not tp.keep_gathered
        gathered: list[Gathering] = []

        def start_gather() -> None:
            if gathers:
                gathered.append(tp.transport.gather(kept, whole=True, other=0))

        def add_gradients() -> None:
            x = gathered.pop().finish() if gathers else kept
            add_weight_gradient(weight, columns, _columns_of(x, inverse_scale, amax))
            if of_bias is not None:
                add_to_main_grad(bias, of_bias)

        submit(start_gather)
        grad_x = _multiply_and_scatter(rows, grad_y, weight_by_columns(weight), tp.transport, fast=FAST_GRADIENTS)
        submit(add_gradients)
        return grad_x.finish(), None, None, None, None


class _Shared:
    """What the two halves of a row-parallel product leave for each other."""

    x: Fp8Matrix | None = None
    """The input by rows, from `_RowWeight.forward` to `_Row.forward`."""
    grad_y: Fp8Matrix | Tensor | None = None
    """The gradient of the sum, by columns or still to be cast, from `_Row.backward` to `_RowWeight.backward`."""
    amax: Tensor | None = None
    """Of the gradient that is still to be cast."""


class _Row(torch.autograd.Function):
    """The product summed over ranks, and its input gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel, shared: _Shared) -> Tensor:
        ctx.weight, ctx.tp, ctx.shared = weight, tp, shared
        rows, shared.x = shared.x, None
        if rows is None:
            raise RuntimeError("the input was not cast")
        return _multiply_and_scatter(rows, x, weight_by_rows(weight), tp.transport, fast=True).finish()

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None, None]:
        matrix = weight_by_columns(ctx.weight)
        if ctx.tp.gathers:
            gathering = ctx.tp.transport.gather(grad_y, whole=True, other=ctx.weight.shape[1])
            grad_x, ctx.shared.amax = _multiply_gathered(gathering, matrix, GRADIENTS, fast=FAST_GRADIENTS)
            ctx.shared.grad_y = gathering.finish()
        else:
            rows, ctx.shared.grad_y = both_ways(grad_y, GRADIENTS)
            grad_x = multiply(rows, matrix, grad_y.dtype, fast=FAST_GRADIENTS).unflatten(0, grad_y.shape[:-1])
        return grad_x, None, None, None


class _RowWeight(torch.autograd.Function):
    """Identity before `_Row`, for which it casts the input, and whose weight gradient it adds.

    It alone keeps something for backward, for the reason given in `linear.py`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel, shared: _Shared, keep: bool) -> Tensor:
        ctx.weight, ctx.tp, ctx.shared = weight, tp, shared
        shared.x = _cast_and_keep(ctx, x, keep)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, None, None, None, None]:
        x = ctx.saved_tensors[0].detach()
        weight, inverse_scale = ctx.weight, ctx.inverse_scale
        grad_y, ctx.shared.grad_y = ctx.shared.grad_y, None
        amax, ctx.shared.amax = ctx.shared.amax, None

        def add_gradient() -> None:
            columns = grad_y if isinstance(grad_y, Fp8Matrix) else by_columns(grad_y, GRADIENTS, amax)
            add_weight_gradient(weight, columns, _columns_of(x, inverse_scale))

        ctx.tp.weight_gradients.submit(add_gradient)
        return grad_x, None, None, None, None


def _cast_and_keep(ctx: Any, x: Tensor, keep: bool) -> Fp8Matrix:
    """The input by rows; by columns it is kept for the weight gradient."""
    if not keep:
        return by_rows(x, VALUES)
    rows, columns = both_ways(x, VALUES)
    ctx.save_for_backward(columns.values)
    ctx.inverse_scale = columns.inverse_scale
    return rows


def _columns_of(kept: Tensor, inverse_scale: Tensor | None, amax: Tensor | None = None) -> Fp8Matrix:
    """The input by columns: as it was kept, or cast now because it was gathered or computed again."""
    if kept.dtype is VALUES and inverse_scale is not None:
        return Fp8Matrix(kept, inverse_scale)
    return by_columns(kept, VALUES, amax)


def _multiply_gathered(
    gathering: Gathering, matrix: Fp8Matrix, dtype: torch.dtype, *, fast: bool
) -> tuple[Tensor, Tensor]:
    """`products.multiply_gathered` of pieces that are cast as they arrive; `matrix` is `[out, in]`.

    Also gives the largest magnitudes of what was gathered, for who casts the whole of it later.
    """
    y: Tensor | None = None
    magnitudes = []
    for piece in gathering.pieces:
        x = gathering.rows(piece)
        if y is None:
            y = x.new_empty(*gathering.tokens, matrix.values.shape[0])
        out = slices(y, piece, gathering.pieces).flatten(0, 1)
        magnitudes.append(amax_of(x))
        multiply(by_rows(x, dtype, magnitudes[-1]), matrix, x.dtype, fast=fast, out=out)
    if y is None:
        raise ValueError("there are no pieces")
    return y, magnitudes[0] if len(magnitudes) == 1 else torch.cat(magnitudes)


def _multiply_and_scatter(
    rows: Fp8Matrix, x: Tensor, matrix: Fp8Matrix, transport: Transport, *, fast: bool
) -> Scattering:
    """`products.multiply_and_scatter` of `x`, which is `rows` in fp8; `matrix` is `[out, in]`."""
    seq, batch, features = x.shape
    scattering = transport.scatter((seq, batch), matrix.values.shape[0], features)
    size = seq // sum(map(len, scattering.pieces))
    for piece in scattering.pieces:
        part = rows.rows(piece.start * size * batch, piece.stop * size * batch)
        product = multiply(part, matrix, x.dtype, fast=fast)
        scattering.send(piece, product.unflatten(0, (len(piece) * size, batch)))
    return scattering

"""`ColumnParallelLinear` and `RowParallelLinear`: the two products that tensor parallelism is made of.

A column-parallel product splits its output features, a row-parallel one its input features, so that the second
follows the first with no communication between them (Shoeybi et al. 1909.08053). What is communicated, and when:

    sequence parallel      forward                 backward
    column                 all-gather of x         all-gather of x again, reduce-scatter of dx
    row                    reduce-scatter of y     all-gather of dy
    without it
    column                 -                       all-reduce of dx
    row                    all-reduce of y         -
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from triweave.collectives import (
    Pending,
    finish,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from triweave.gradients import add_product, add_to_main_grad
from triweave.layers.tensor_parallel import TensorParallel


class ColumnParallelLinear(nn.Module):
    """`y = x W^T + b` with the rows of W (output features) split over the tensor-parallel ranks.

    Forward: `[seq/tp, batch, in]` (`[seq, batch, in]` without sequence parallelism) to `[seq, batch, out/tp]`.

    Only the input's own slice is kept for backward and is gathered again there: for Llama-3-70B at TP 8 and
    sequence 8192 the gathered inputs would be 256 MiB a layer. That gather runs beside the input gradient's
    product, and the input gradient's reduction beside the weight gradient's.
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, *, bias: bool = False) -> None:
        """`out_features` are this rank's own."""
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[seq/tp, batch, in]` or `[seq, batch, in]` to `[seq, batch, out/tp]`."""
        product: Tensor = _Linear.apply(x, self.weight, self.bias, self.tp, self.tp.size > 1)
        return product


class RowParallelLinear(nn.Module):
    """`y = x W^T` with the columns of W (input features) split over the tensor-parallel ranks.

    Forward: `[seq, batch, in/tp]` to `[seq/tp, batch, out]` (`[seq, batch, out]` without sequence parallelism).
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel) -> None:
        """`in_features` are this rank's own."""
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """`[seq, batch, in/tp]` to `[seq/tp, batch, out]` or `[seq, batch, out]`."""
        partial = _Linear.apply(x, self.weight, None, self.tp, False)
        return combine_partial(partial, self.tp)


def combine_partial(partial: Tensor, tp: TensorParallel) -> Tensor:
    """Sum what each tensor-parallel rank computed of `[seq, batch, hidden]`, sliced along the sequence if so asked."""
    if tp.sequence_parallel:
        return reduce_scatter_to_sequence_parallel(partial, tp.group)
    return reduce_from_tensor_parallel(partial, tp.group)


class _Linear(torch.autograd.Function):
    """The product, its input gradient now, its weight gradient now or in the schedule's weight half."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel, column_parallel: bool
    ) -> Tensor:
        ctx.save_for_backward(x)
        # Held as they are and not as saved tensors: sharding may free and refill the storage in between.
        ctx.weight, ctx.bias, ctx.tp = weight, bias, tp
        ctx.column_parallel = column_parallel
        if column_parallel and tp.sequence_parallel:
            x = finish(start_all_gather(x, tp.group))
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias, tp = ctx.weight, ctx.bias, ctx.tp
        gather = ctx.column_parallel and tp.sequence_parallel
        submit = tp.weight_gradients.submit
        gathered: list[Pending] = []

        def start_gather() -> None:
            gathered.append(start_all_gather(x, tp.group) if gather else (x, None))

        def add_weight_gradient() -> None:
            inputs = finish(gathered.pop())
            add_product(weight, grad_output.flatten(0, -2), inputs.flatten(0, -2))
            if bias is not None:
                add_to_main_grad(bias, grad_output.flatten(0, -2).sum(0, dtype=torch.float32))

        submit(start_gather)
        grad_x = grad_output @ weight
        if not ctx.column_parallel:
            submit(add_weight_gradient)
            return grad_x, None, None, None, None
        reduction = start_reduce_scatter(grad_x, tp.group) if gather else start_all_reduce(grad_x, tp.group)
        submit(add_weight_gradient)
        return finish(reduction), None, None, None, None

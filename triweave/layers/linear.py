"""`ColumnParallelLinear` and `RowParallelLinear`: the two products that tensor parallelism is made of.

A column-parallel product splits its output features, a row-parallel one its input features, so that the second
follows the first with no communication between them (Shoeybi et al. 1909.08053). What is communicated, and when:

    sequence parallel      forward                 backward
    column                 gather of x             gather of x again, scatter of dx
    row                    scatter of y            gather of dy
    without it
    column                 -                       all-reduce of dx
    row                    all-reduce of y         -

Here is when it starts and what is computed meanwhile; `products.py` cuts the products, `triweave.transport` carries.
The same in fp8 is in `fp8_linear.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from triweave.collectives import (
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from triweave.gradients import add_product, add_to_main_grad
from triweave.layers.fp8_linear import multiply_columns_in_fp8, multiply_rows_in_fp8
from triweave.layers.products import multiply_and_scatter, multiply_gathered
from triweave.layers.tensor_parallel import TensorParallel
from triweave.transport.interface import Gathering


class ColumnParallelLinear(nn.Module):
    """`y = x W^T + b` with the rows of W (output features) split over the tensor-parallel ranks.

    Forward: `[seq/tp, batch, in]` (`[seq, batch, in]` without sequence parallelism) to `[seq, batch, out/tp]`.

    Only the input's own slice is kept for backward and is gathered again there: for Llama-3-70B at TP 8 and
    sequence 8192 the gathered inputs would be 256 MiB a layer. That gather runs beside the input gradient's
    product, and the input gradient's reduction beside the weight gradient's. With `keep_gathered` there is no
    second gather, for who has the memory.
    """

    def __init__(
        self, in_features: int, out_features: int, tp: TensorParallel, *, bias: bool = False, fp8: bool = False
    ) -> None:
        """`out_features` are this rank's own; `fp8` multiplies in fp8, forward and backward."""
        super().__init__()
        self.tp = tp
        self.fp8 = fp8
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[seq/tp, batch, in]` or `[seq, batch, in]` to `[seq, batch, out/tp]`."""
        if self.fp8:
            return multiply_columns_in_fp8(x, self.weight, self.bias, self.tp)
        product: Tensor = _Column.apply(x, self.weight, self.bias, self.tp)
        return product


class RowParallelLinear(nn.Module):
    """`y = x W^T` with the columns of W (input features) split over the tensor-parallel ranks.

    Forward: `[seq, batch, in/tp]` to `[seq/tp, batch, out]` (`[seq, batch, out]` without sequence parallelism).
    """

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, *, fp8: bool = False) -> None:
        """`in_features` are this rank's own; `fp8` multiplies in fp8, forward and backward."""
        super().__init__()
        self.tp = tp
        self.fp8 = fp8
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """`[seq, batch, in/tp]` to `[seq/tp, batch, out]` or `[seq, batch, out]`."""
        if self.fp8:
            return multiply_rows_in_fp8(x, self.weight, self.tp)
        gradient_of_sum: list[Tensor] = []
        x = _RowWeight.apply(x, self.weight, self.tp, gradient_of_sum)
        total: Tensor = _Row.apply(x, self.weight, self.tp, gradient_of_sum)
        return total


def combine_partial(partial: Tensor, tp: TensorParallel) -> Tensor:
    """Sum what each tensor-parallel rank computed of `[seq, batch, hidden]`, sliced along the sequence if so asked."""
    if tp.sequence_parallel:
        return reduce_scatter_to_sequence_parallel(partial, tp.group)
    return reduce_from_tensor_parallel(partial, tp.group)


class _Column(torch.autograd.Function):
    """The product, its input gradient now, its weight gradient now or in the schedule's weight half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
        # Held as they are and not as saved tensors: sharding may free and refill the storage in between.
        ctx.weight, ctx.bias, ctx.tp = weight, bias, tp
        gathering = tp.transport.gather(x, whole=tp.keep_gathered, other=weight.shape[0])
        y = multiply_gathered(gathering, weight.t(), bias)
        gathered = gathering.finish()
        ctx.save_for_backward(gathered if tp.keep_gathered else x)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None, None]:
        # Without the graph that made it, which would hold the layer's input as long as the weight gradient is put off.
        kept = ctx.saved_tensors[0].detach()
        weight, bias, tp, transport = ctx.weight, ctx.bias, ctx.tp, ctx.tp.transport
        submit = tp.weight_gradients.submit
        gathered: list[Gathering] = []

        def start_gather() -> None:
            gathered.append(transport.gather(kept, whole=True, other=0))

        def add_weight_gradient() -> None:
            x = kept if tp.keep_gathered else gathered.pop().finish()
            add_product(weight, grad_y.flatten(0, -2), x.flatten(0, -2))
            if bias is not None:
                add_to_main_grad(bias, grad_y.flatten(0, -2).sum(0, dtype=torch.float32))

        if not tp.keep_gathered:
            submit(start_gather, one_earlier=True)
        grad_x = multiply_and_scatter(grad_y, weight, transport)
        submit(add_weight_gradient)
        return grad_x.finish(), None, None, None


class _Row(torch.autograd.Function):
    """The product summed over ranks, and its input gradient. It leaves what it gathered to `_RowWeight`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel, gradient_of_sum: list[Tensor]) -> Tensor:
        ctx.weight, ctx.tp, ctx.gradient_of_sum = weight, tp, gradient_of_sum
        return multiply_and_scatter(x, weight.t(), tp.transport).finish()

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None, None]:
        gathering = ctx.tp.transport.gather(grad_y, whole=True, other=ctx.weight.shape[1])
        grad_x = multiply_gathered(gathering, ctx.weight)
        ctx.gradient_of_sum.append(gathering.finish())
        return grad_x, None, None, None


class _RowWeight(torch.autograd.Function):
    """Identity before `_Row`, whose weight gradient it adds, now or in the schedule's weight half.

    It alone keeps the input: a block that is run again for backward stops when the last input is kept, which is here,
    before the product and the communication that backward has no use for.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel, gradient_of_sum: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp, ctx.gradient_of_sum = weight, tp, gradient_of_sum
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, None, None, None]:
        x = ctx.saved_tensors[0].detach()
        weight, grad_y = ctx.weight, ctx.gradient_of_sum.pop()
        ctx.tp.weight_gradients.submit(lambda: add_product(weight, grad_y.flatten(0, -2), x.flatten(0, -2)))
        return grad_x, None, None, None

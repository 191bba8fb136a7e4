"""The SwiGLU MLP (Shazeer 2002.05202), gate and up computed as one column-parallel product."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from triweave.kernels.dispatch import uses_kernels
from triweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from triweave.layers.tensor_parallel import TensorParallel
from triweave.recompute import recomputing


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`.

    Each rank holds its own slice of gate beside its own slice of up: cutting a concatenated gate-and-up by rows
    would give half the ranks only gates.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, tp: TensorParallel, *, recompute: bool, fp8: bool = False
    ) -> None:
        """`intermediate_size` is the whole model's; `recompute` keeps gate and up but not their product."""
        super().__init__()
        width = intermediate_size // tp.size
        self.recompute = recompute
        self.gate_up_proj = ColumnParallelLinear(hidden_size, 2 * width, tp, fp8=fp8)
        self.down_proj = RowParallelLinear(width, hidden_size, tp, fp8=fp8)

    def forward(self, gate_up: Tensor) -> Tensor:
        """What `gate_up_proj` gave, `[seq, batch, 2 * ffn/tp]`, to `[seq/tp, batch, hidden]`."""
        function = partial(swiglu, for_fp8=self.down_proj.fp8)
        product = function(gate_up)
        with recomputing(function, gate_up, enabled=self.recompute):
            down: Tensor = self.down_proj(product)
            return down


def swiglu(gate_up: Tensor, *, for_fp8: bool = False) -> Tensor:
    """`silu(gate) * up` of `[..., 2 * width]`, giving `[..., width]`; keeps only its input for backward.

    With `for_fp8` the kernels note the largest magnitude of the product and of the gradient, which are cast next.
    """
    product: Tensor = _SwiGLU.apply(gate_up, for_fp8)
    return product


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, for_fp8: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.for_fp8 = for_fp8
        if uses_kernels(gate_up):
            from triweave.kernels.swiglu import swiglu_forward

            return swiglu_forward(gate_up, notes=for_fp8)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        if uses_kernels(gate_up):
            from triweave.kernels.swiglu import swiglu_backward

            return swiglu_backward(grad, gate_up, notes=ctx.for_fp8), None
        gate, up = gate_up.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((grad_gate, grad * gate * sigmoid), dim=-1), None

"""RMSNorm (Zhang and Sennrich 1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from triweave.gradients import add_to_main_grad
from triweave.layers.tensor_parallel import TensorParallel


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, computed in float32.

    Under sequence parallelism each rank normalises its own positions, so its weight gradient is a partial sum;
    it is summed over the tensor-parallel ranks once a step (`Piece.partial`), not once a micro-batch.
    """

    def __init__(self, hidden_size: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.eps = eps
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same shape."""
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.tp)
        return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, tp: TensorParallel) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.eps, ctx.tp = weight, eps, tp
        return rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        with torch.enable_grad():
            x, scale = x.detach().requires_grad_(), weight.detach().requires_grad_()
            normed = rms_norm(x, scale.shape, scale, ctx.eps)
        grad_x, grad_weight = torch.autograd.grad(normed, (x, scale), grad)
        ctx.tp.weight_gradients.submit(lambda: add_to_main_grad(weight, grad_weight))
        return grad_x, None, None, None

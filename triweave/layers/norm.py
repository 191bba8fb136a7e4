"""RMSNorm (Zhang and Sennrich 1910.07467), alone and where the residual stream passes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from triweave.gradients import add_to_main_grad
from triweave.kernels.dispatch import uses_kernels
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
        _, normed = _RMSNorm.apply(x, None, self.weight, self.eps, self.tp)
        return normed  # type: ignore[no-any-return]

    def again(self, x: Tensor) -> Tensor:
        """The same bits as in forward, for a product that did not keep them; autograd does not see it."""
        with torch.no_grad():
            return _normalize(x, self.weight, self.eps)


class ResidualRMSNorm(RMSNorm):
    """The norm that a half of a layer begins with: the residual stream goes past it.

    Stream and norm are one operation, so that their gradients meet in its backward and not in a pass of their own.
    """

    def forward(self, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The stream and its norm.

        Args:
            x: `[..., hidden]`.
            update: what the half before adds to the stream, same shape.

        Returns:
            `x`, or `x + update`, and the norm of that.
        """
        stream, normed = _RMSNorm.apply(x, update, self.weight, self.eps, self.tp)
        return stream, normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, eps: float, tp: TensorParallel
    ) -> tuple[Tensor, Tensor]:
        if update is None:
            stream, normed = x, _normalize(x, weight, eps)
        else:
            stream, normed = _add_and_normalize(x, update, weight, eps)
        ctx.save_for_backward(stream)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.eps, ctx.tp, ctx.adds = weight, eps, tp, update is not None
        return stream, normed

    @staticmethod
    def backward(
        ctx: Any, grad_stream: Tensor | None, grad_normed: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        (stream,) = ctx.saved_tensors
        weight = ctx.weight
        grad, grad_weight = _backward(grad_normed, grad_stream, stream, weight, ctx.eps)
        ctx.tp.weight_gradients.submit(lambda: add_to_main_grad(weight, grad_weight))
        return grad, grad if ctx.adds else None, None, None, None


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if uses_kernels(x):
        from triweave.kernels.norm import normalize

        return normalize(x, weight, eps)
    return rms_norm(x, weight.shape, weight, eps)


def _add_and_normalize(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if uses_kernels(x):
        from triweave.kernels.norm import add_and_normalize

        return add_and_normalize(x, update, weight, eps)
    stream = x + update
    return stream, _normalize(stream, weight, eps)


def _backward(
    grad_normed: Tensor, grad_stream: Tensor | None, stream: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if uses_kernels(stream):
        from triweave.kernels.norm import norm_backward

        return norm_backward(grad_normed, grad_stream, stream, weight, eps)
    with torch.enable_grad():
        x, scale = stream.detach().requires_grad_(), weight.detach().requires_grad_()
        normed = rms_norm(x, scale.shape, scale, eps)
    grad, grad_weight = torch.autograd.grad(normed, (x, scale), grad_normed)
    return grad if grad_stream is None else grad.add_(grad_stream), grad_weight

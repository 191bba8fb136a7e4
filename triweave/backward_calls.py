"""Work that is done when backward comes by a place in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def call_in_backward(x: Tensor, work: Callable[[], None]) -> Tensor:
    """`x` itself, for whose gradient `work` is called: all that was computed from what this returns is done."""
    result: Tensor = _Then.apply(x, work)
    return result


class _Then(torch.autograd.Function):
    """Identity that calls `work` when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.work()
        return grad, None

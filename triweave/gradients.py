"""Where weight gradients go: into float32 sums beside the parameters, at once or when the schedule asks.

Every parameter has one float32 sum, `parameter.main_grad`, that all micro-batches add to. A new step does not fill it
with zeros: it marks it (`begin_sum`), and the first product overwrites what is there. Layers never hand a weight
gradient to autograd; they submit the work to a `WeightGradients`. A schedule that splits backward puts the work off and
runs it in its weight half (Qi et al. 2401.10241), whatever the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Work = Callable[[], None]


class WeightGradients:
    """Runs submitted work at once, or keeps it in order while deferring."""

    def __init__(self) -> None:
        self._deferred: list[Work] | None = None

    def submit(self, work: Work, *, one_earlier: bool = False) -> None:
        """Run `work` now; inside `deferring`, keep it.

        `one_earlier` is for what starts a transfer: of deferred work it comes before the piece submitted last, which
        hides it. That piece's operands are held until then anyway.
        """
        if self._deferred is None:
            work()
        elif one_earlier:
            self._deferred.insert(max(len(self._deferred) - 1, 0), work)
        else:
            self._deferred.append(work)

    @contextmanager
    def deferring(self) -> Iterator[list[Work]]:
        """Collect submitted work instead of running it; the list is the caller's to run, in order and without grad."""
        collected: list[Work] = []
        self._deferred = collected
        try:
            yield collected
        finally:
            self._deferred = None


def begin_sum(parameter: Tensor) -> None:
    """Forget what was added to a parameter's sum."""
    parameter.main_grad_is_former = True  # type: ignore[attr-defined]


def main_grad(parameter: Tensor) -> Tensor:
    """The float32 gradient sum of a parameter, to be added to; made on first use where nobody has placed one."""
    total, begins = sum_of(parameter)
    return total.zero_() if begins else total


def sum_of(parameter: Tensor) -> tuple[Tensor, bool]:
    """The float32 gradient sum of a parameter, and whether the caller, who adds something now, has to overwrite it.

    It has to where nothing was added since `begin_sum`: what is there is of the step before.
    """
    total: Tensor | None = getattr(parameter, "main_grad", None)
    if total is None:
        total = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.main_grad = total  # type: ignore[attr-defined]
    begins: bool = getattr(parameter, "main_grad_is_former", False)
    parameter.main_grad_is_former = False  # type: ignore[attr-defined]
    return total, begins


def add_product(parameter: Tensor, grad_output: Tensor, x: Tensor) -> None:
    """Add `grad_output^T x` to the gradient sum of a `[out, in]` weight.

    Args:
        parameter: the weight.
        grad_output: `[tokens, out]`.
        x: `[tokens, in]`.
    """
    total, begins = sum_of(parameter)
    if x.is_cuda and x.dtype is not torch.float32:
        # The product is summed in float32 and added by the matrix kernel itself: no bf16 copy, no extra pass.
        if begins:
            torch.mm(grad_output.t(), x, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, grad_output.t(), x, out_dtype=torch.float32, out=total)
    elif x.dtype is torch.float32:
        total.addmm_(grad_output.t(), x, beta=0 if begins else 1)
    elif begins:
        total.copy_(grad_output.t() @ x)
    else:
        total.add_(grad_output.t() @ x)


def add_to_main_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Add one micro-batch's gradient, of any dtype, to the float32 sum."""
    main_grad(parameter).add_(gradient)

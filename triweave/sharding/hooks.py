"""Where a module's forward and backward begin and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Passes:
    """What to do around the passes of one module."""

    before_forward: Work
    after_forward: Work
    before_backward: Work
    after_backward: Work
    """Never called where no gradient flows to the module's first input: the embedding's are tokens."""


def surround(module: nn.Module, passes: Passes) -> None:
    """Call `passes` around each forward of `module` and around its backward; it takes and gives one activation."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        passes.before_forward()
        return (_Then.apply(args[0], passes.after_backward), *args[1:])

    def after(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        passes.after_forward()
        result: Tensor = _Then.apply(output, passes.before_backward)
        return result

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


class _Then(torch.autograd.Function):
    """Identity that calls `work` when backward comes by: all that was computed from its output is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Work) -> Tensor:
        ctx.work = work
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.work()
        return grad, None

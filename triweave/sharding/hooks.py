"""Where a module's forward and backward begin and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from triweave.backward_calls import call_in_backward

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
        return (call_in_backward(args[0], passes.after_backward), *args[1:])

    def after(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        passes.after_forward()
        return call_in_backward(output, passes.before_backward)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)

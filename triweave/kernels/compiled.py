"""Triton kernels that are launched as they were compiled, without Triton's search for the compiled one.

`kernel[grid](...)` binds and inspects every argument at each call, to find what was compiled for arguments like these:
20 to 60 us on a host, where the launch itself takes a few. What it found is kept here by everything that the search
looks at, so that arguments of another kind are searched for again and never meet a kernel that was not made for them.
What is kept is called as Triton's own tutorial on fused softmax calls it, `compiled[grid](...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from triweave.kernels.language import triton

ALIGNMENT = 16
"""Bytes. Triton compiles for addresses that are a multiple of it, or for any."""

Key = tuple[object, ...]


class Kernel:
    """A Triton kernel, and its launchers by the kind of their arguments."""

    def __init__(self, jit: Any) -> None:
        """Take what `triton.jit` made."""
        self.jit = jit
        self._launchers: dict[Key, tuple[Callable[..., None], list[object]]] = {}

    def launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Run it.

        Args:
            grid: programs in up to three dimensions.
            arguments: all but the constants, in the order of the kernel.
            options: its constants (`tl.constexpr`), which come last in it, and Triton's own.
        """
        key = (grid, arguments[0].get_device(), *map(_kind, arguments), *options.items())
        known = self._launchers.get(key)
        if known is not None:
            run, constants = known
            run(*arguments, *constants)
            return
        compiled = self.jit[grid](*arguments, **options)
        if compiled is not None:  # the interpreter compiles nothing
            constants = [options[name] for name in self.jit.arg_names[len(arguments) :]]
            self._launchers[key] = compiled[(*grid, 1, 1)[:3]], constants


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a kernel that the host launches."""
    return Kernel(triton.jit(function))


def _kind(argument: object) -> object:
    """All of an argument that may decide what is compiled: of a float its type, of a whole number the number."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT
    return float if isinstance(argument, float) else argument

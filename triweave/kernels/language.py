"""Triton; or, where it is not installed, what it takes to import the kernels and to call them on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

__all__ = ["HAS_TRITON", "tl", "triton"]

HAS_TRITON = find_spec("triton") is not None
"""torch brings it along where it is built for a GPU."""


class _NoTriton:
    """The host's part of Triton: nothing is compiled, for nothing is launched."""

    @staticmethod
    def jit(function: Callable[..., None]) -> Callable[..., None]:
        return function

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(-x // y)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


if HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton, tl = _NoTriton(), None

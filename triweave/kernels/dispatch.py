"""Whether an operation runs as a Triton kernel or as plain torch."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def uses_kernels(x: Tensor) -> bool:
    """Whether the kernels compute what `x` goes into: on a GPU, where Triton is installed (torch brings it along)."""
    return x.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None

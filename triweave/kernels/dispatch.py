"""Whether an operation runs as a Triton kernel or as plain torch, and how a kernel is launched."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from triweave.kernels.language import HAS_TRITON

_LIBRARY = torch.library.Library("triweave", "DEF")
_LIBRARY.define("launched(Tensor first) -> ()")
_LIBRARY.impl("launched", lambda first: None, "Meta")

PROCESSORS_NOT_THERE = 132
"""Multiprocessors of a GPU that is not there: those of H100 and H200."""


def uses_kernels(x: Tensor) -> bool:
    """Whether the kernels compute what `x` goes into: on a GPU, where Triton is installed (torch brings it along).

    A tensor on the meta device that says that it is on a GPU is one of `triweave.dryrun`: the GPU that is not there
    has Triton.
    """
    return x.is_cuda and (HAS_TRITON or x.is_meta)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a kernel.

    On the meta device its outputs, which are made before, are all that there is of it; who follows operations is shown
    one that does nothing, `triweave::launched`.
    """
    if arguments[0].is_meta:
        torch.ops.triweave.launched(arguments[0])
    else:
        kernel[grid](*arguments, **options)


def num_processors(x: Tensor) -> int:
    """Multiprocessors of the GPU that holds `x`; 2 elsewhere, where kernels are interpreted."""
    if x.is_meta:
        return PROCESSORS_NOT_THERE
    return _processors_of(x.get_device()) if x.is_cuda else 2


@cache
def _processors_of(gpu: int) -> int:
    return torch.cuda.get_device_properties(gpu).multi_processor_count

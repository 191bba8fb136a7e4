"""One tensor to two places in one pass: it is read once, where two copies read it twice."""

from __future__ import annotations

from torch import Tensor

from triweave.kernels.dispatch import launch
from triweave.kernels.language import tl, triton

_BLOCK = 4096


def copy_to_both(source: Tensor, first: Tensor, second: Tensor) -> None:
    """Copy `source` into `first` and into `second`, all contiguous and of one shape and type."""
    numel = source.numel()
    launch(_copy, (triton.cdiv(numel, _BLOCK),), source, first, second, numel, BLOCK=_BLOCK)


@triton.jit
def _copy(source: tl.tensor, first: tl.tensor, second: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    value = tl.load(source + at, mask=inside)
    tl.store(first + at, value, mask=inside)
    tl.store(second + at, value, mask=inside)

"""The sum of one part a rank in one pass, where torch adds them one after another through float32 memory."""

from __future__ import annotations

import torch
from torch import Tensor

from triweave.kernels.dispatch import launch
from triweave.kernels.language import tl, triton

_BLOCK, _FEWEST_PARTS, _MOST_PARTS = 2048, 3, 8


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Sum three parts or more of one shape, first to last in float32, rounded once.

    Raises:
        ValueError: fewer than three parts, whose sum torch rounds once; more than ranks of a node, for larger groups
            do not come here.
    """
    if not _FEWEST_PARTS <= len(parts) <= _MOST_PARTS:
        raise ValueError(f"{len(parts)} parts, {_FEWEST_PARTS} to {_MOST_PARTS} in one sum")
    parts = [part.contiguous() for part in parts]
    total = torch.empty_like(parts[0])
    rest = parts[3:] + [parts[0]] * (_MOST_PARTS - len(parts))
    grid = (triton.cdiv(total.numel(), _BLOCK),)
    launch(_sum, grid, total, *parts[:3], *rest, total.numel(), PARTS=len(parts), BLOCK=_BLOCK)
    return total


@triton.jit
def _sum(
    total: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    fourth: tl.tensor,
    fifth: tl.tensor,
    sixth: tl.tensor,
    seventh: tl.tensor,
    eighth: tl.tensor,
    numel: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    value = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(third + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 3:
        value += tl.load(fourth + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 4:
        value += tl.load(fifth + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 5:
        value += tl.load(sixth + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 6:
        value += tl.load(seventh + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 7:
        value += tl.load(eighth + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)

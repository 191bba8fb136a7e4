"""What a rank does with its slice of the logits: statistics in one reading, the gradient in their place."""

from __future__ import annotations

import torch
from torch import Tensor

from triweave.kernels.dispatch import launch
from triweave.kernels.language import tl, triton

_BLOCK, _WARPS = 4096, 8


def logit_statistics(logits: Tensor, local_targets: Tensor, num_valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row its highest logit, the sum of exponentials relative to that, and the target's logit.

    Args:
        logits: contiguous `[..., columns]`; only the first `num_valid` columns are vocabulary.
        local_targets: int64 `[...]`, a column, or anything outside of them where the target is not here.
        num_valid: may be 0; the highest logit is then minus infinity and the sum 0.

    Returns:
        Three float32 tensors `[...]`; the target's logit is 0 where it is not here.
    """
    columns = logits.shape[-1]
    highest, total, target = torch.empty((3, *logits.shape[:-1]), dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(columns))
    launch(
        _statistics,
        (logits.numel() // columns,),
        logits,
        local_targets.contiguous(),
        highest,
        total,
        target,
        columns,
        num_valid,
        num_valid // block * block,
        BLOCK=block,
        num_warps=_WARPS,
    )
    return highest, total, target


def logits_to_gradient(
    logits: Tensor, local_targets: Tensor, num_valid: int, highest: Tensor, total: Tensor, scale: Tensor
) -> None:
    """Overwrite logits with `(softmax - one-hot) * scale`, 0 beyond the vocabulary.

    Args:
        logits: contiguous `[..., columns]`.
        local_targets: as for `logit_statistics`.
        num_valid: likewise.
        highest: float32 `[...]`, over all ranks.
        total: float32 `[...]`, sum of exponentials relative to `highest` over all ranks.
        scale: float32 `[...]`, what each row's gradient is multiplied with.
    """
    columns = logits.shape[-1]
    block = min(_BLOCK, triton.next_power_of_2(columns))
    grid = (logits.numel() // columns, triton.cdiv(columns, block))
    launch(
        _gradient,
        grid,
        logits,
        local_targets.contiguous(),
        highest,
        total,
        scale,
        columns,
        num_valid,
        BLOCK=block,
        num_warps=_WARPS,
    )
    # Autograd cannot see what a kernel writes: told, it refuses to use these logits for a second backward.
    torch.autograd.graph.increment_version(logits)


@triton.jit
def _statistics(
    logits: tl.tensor,
    targets: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    target_logit: tl.tensor,
    columns: tl.tensor,
    num_valid: tl.tensor,
    num_whole: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * columns
    lanes = tl.arange(0, BLOCK)
    top = -float("inf")
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    # Whole blocks without a mask: whatever the size of the vocabulary, they are read 16 bytes at a time.
    for start in range(0, num_whole, BLOCK):
        values = tl.load(base + start + lanes).to(tl.float32)
        higher = tl.maximum(top, tl.max(values))
        sums = sums * tl.exp(top - higher) + tl.exp(values - higher)
        top = higher
    inside = num_whole + lanes < num_valid
    values = tl.load(base + num_whole + lanes, mask=inside, other=-float("inf")).to(tl.float32)
    higher = tl.maximum(top, tl.max(values))
    # Where there is no vocabulary at all: nothing to subtract, and every exponential is 0.
    subtracted = tl.where(higher == -float("inf"), 0.0, higher)
    sums = sums * tl.exp(top - subtracted) + tl.exp(values - subtracted)
    target = tl.load(targets + row)
    here = (target >= 0) & (target < columns)
    tl.store(highest + row, higher)
    tl.store(total + row, tl.sum(sums))
    tl.store(target_logit + row, tl.load(base + target, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _gradient(
    logits: tl.tensor,
    targets: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    num_valid: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = logits + row * columns + column
    # Padding is read, so that the mask is one of whole vectors, and taken out then.
    values = tl.where(column < num_valid, tl.load(at, mask=inside, other=0.0).to(tl.float32), -float("inf"))
    probability = tl.exp(values - tl.load(highest + row)) / tl.load(total + row)
    # The difference is taken before it is rounded: in bfloat16 a probability near 1 is 1, and nothing would be left.
    gradient = (probability - tl.where(column == tl.load(targets + row), 1.0, 0.0)) * tl.load(scale + row)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)

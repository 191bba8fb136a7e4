"""RMSNorm with the residual stream: the sum before it and the gradient beside it cost no pass of their own.

Nothing but the stream is kept for backward: reading it again gives its root mean square for free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triweave.kernels.dispatch import launch, num_processors
from triweave.kernels.language import tl, triton

PROGRAMS_PER_PROCESSOR = 2
"""Of the backward: as many as fit at once at hidden size 4096. Each sums the weight gradient of its rows, so that few
partial sums are left to write and add."""


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` of `[..., hidden]`."""
    x, normed = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_forward(x, x, x, normed, weight, eps, add=False)
    return normed


def add_and_normalize(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of `x` and `update`, each `[..., hidden]`, and the norm of that sum."""
    x, update = x.contiguous(), update.contiguous()
    stream, normed = torch.empty_like(x), torch.empty_like(x)
    _launch_forward(x, update, stream, normed, weight, eps, add=True)
    return stream, normed


def norm_backward(
    grad_normed: Tensor, grad_stream: Tensor | None, stream: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the stream and of the weight.

    Args:
        grad_normed: `[..., hidden]`, of the norm's output.
        grad_stream: the same of what went past the norm; it is added.
        stream: what was normalised.
        weight: `[hidden]`.
        eps: of the forward.

    Returns:
        `[..., hidden]` in the type of the stream, and `[hidden]` in float32.
    """
    hidden = stream.shape[-1]
    rows = stream.numel() // hidden
    programs = min(rows, PROGRAMS_PER_PROCESSOR * num_processors(stream))
    grad_normed, stream = grad_normed.contiguous(), stream.contiguous()
    beside = grad_normed if grad_stream is None else grad_stream.contiguous()
    grad = torch.empty_like(stream)
    partial = torch.empty((programs, hidden), dtype=torch.float32, device=stream.device)
    block = triton.next_power_of_2(hidden)
    launch(
        _backward,
        (programs,),
        grad_normed,
        beside,
        stream,
        weight,
        grad,
        partial,
        rows,
        hidden,
        eps,
        ADD=grad_stream is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return grad, partial.sum(0)


def _launch_forward(
    x: Tensor, update: Tensor, stream: Tensor, normed: Tensor, weight: Tensor, eps: float, *, add: bool
) -> None:
    hidden = x.shape[-1]
    block = triton.next_power_of_2(hidden)
    launch(
        _forward,
        (x.numel() // hidden,),
        x,
        update,
        stream,
        normed,
        weight,
        hidden,
        eps,
        ADD=add,
        BLOCK=block,
        num_warps=_warps(block),
    )


def _warps(block: int) -> int:
    """Sixteen numbers of a row a thread."""
    return min(16, max(1, block // 512))


@triton.jit
def _forward(
    x: tl.tensor,
    update: tl.tensor,
    stream: tl.tensor,
    normed: tl.tensor,
    weight: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + columns
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        value = value.to(tl.float32) + tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        # The norm is of the stream as it is stored, so that it can be computed again from there, bit for bit.
        value = value.to(stream.dtype.element_ty)
        tl.store(stream + at, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / hidden + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (value * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_normed: tl.tensor,
    beside: tl.tensor,
    stream: tl.tensor,
    weight: tl.tensor,
    grad: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # With r = (mean(x^2) + eps)^(-1/2), y = x r, n = y w:  dx = r (w dn - y mean(y w dn)),  dw = sum of rows of y dn.
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    at = program.to(tl.int64) * hidden + columns
    step = tl.num_programs(0).to(tl.int64) * hidden
    for _ in range(program, rows, tl.num_programs(0)):
        value = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        if ADD:  # asked for before the sums, which everything after them waits for
            passed = tl.load(beside + at, mask=inside, other=0.0)
        scale = tl.rsqrt(tl.sum(value * value) / hidden + eps)
        value *= scale
        total += upstream * value
        upstream *= gain
        result = scale * (upstream - value * (tl.sum(value * upstream) / hidden))
        if ADD:
            result += passed.to(tl.float32)
        tl.store(grad + at, result.to(grad.dtype.element_ty), mask=inside)
        at += step
    tl.store(partial + program.to(tl.int64) * hidden + columns, total, mask=inside)

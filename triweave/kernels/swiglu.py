"""`silu(gate) * up`, forward and backward, each in one pass, which can note the largest magnitude too."""

from __future__ import annotations

import torch
from torch import Tensor

from triweave.kernels.dispatch import launch
from triweave.kernels.language import tl, triton
from triweave.kernels.noted import note_amax

_BLOCK, _WARPS = 2048, 4


def swiglu_forward(gate_up: Tensor, *, notes: bool = False) -> Tensor:
    """`[..., 2 * width]`, gate before up, to `[..., width]`; `notes` its largest magnitude for a cast to fp8."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    product = gate_up.new_empty((*gate_up.shape[:-1], width))
    block = min(_BLOCK, triton.next_power_of_2(width))
    grid = (product.numel() // width, triton.cdiv(width, block))
    amax = torch.empty(grid if notes else 0, dtype=torch.float32, device=gate_up.device)
    launch(_forward, grid, gate_up, product, amax, width, NOTES=notes, BLOCK=block, num_warps=_WARPS)
    if notes:
        note_amax(product, amax)
    return product


def swiglu_backward(grad: Tensor, gate_up: Tensor, *, notes: bool = False) -> Tensor:
    """The gradient of `[..., width]` to that of gate and up, `[..., 2 * width]`; `notes` as in forward."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    width = grad.shape[-1]
    grad_gate_up = torch.empty_like(gate_up)
    block = min(_BLOCK, triton.next_power_of_2(width))
    grid = (grad.numel() // width, triton.cdiv(width, block))
    amax = torch.empty(grid if notes else 0, dtype=torch.float32, device=grad.device)
    launch(_backward, grid, grad, gate_up, grad_gate_up, amax, width, NOTES=notes, BLOCK=block, num_warps=_WARPS)
    if notes:
        note_amax(grad_gate_up, amax)
    return grad_gate_up


@triton.jit
def _forward(
    gate_up: tl.tensor, product: tl.tensor, amax: tl.tensor, width: tl.tensor, NOTES: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = gate_up + row * 2 * width + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(product + row * width + columns, result.to(product.dtype.element_ty), mask=inside)
    if NOTES:
        tl.store(amax + row * tl.num_programs(1) + tl.program_id(1), tl.max(tl.abs(result)))


@triton.jit
def _backward(
    grad: tl.tensor,
    gate_up: tl.tensor,
    grad_gate_up: tl.tensor,
    amax: tl.tensor,
    width: tl.tensor,
    NOTES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = gate_up + row * 2 * width + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    element = grad_gate_up.dtype.element_ty
    result = grad_gate_up + row * 2 * width + columns
    of_gate = upstream * up * (sigmoid + silu * (1.0 - sigmoid))
    of_up = upstream * silu
    tl.store(result, of_gate.to(element), mask=inside)
    tl.store(result + width, of_up.to(element), mask=inside)
    if NOTES:
        largest = tl.max(tl.maximum(tl.abs(of_gate), tl.abs(of_up)))
        tl.store(amax + row * tl.num_programs(1) + tl.program_id(1), largest)

"""Rotary embedding where queries, keys and values lie: side by side in one product's output."""

from __future__ import annotations

import torch
from torch import Tensor

from triweave.kernels.dispatch import launch
from triweave.kernels.language import tl, triton

_WARPS = 4


def rotate_in_place(heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first `num_rotated` of the heads of every token.

    Args:
        heads: contiguous `[seq, batch, heads, head_dim]`.
        num_rotated: query and key heads; the values after them stay.
        cos: `[seq, batch, 1, head_dim]`, both halves alike.
        sin: as `cos`.
    """
    seq, batch, _, head_dim = heads.shape
    cos, sin = (table.expand(seq, batch, 1, head_dim) for table in (cos, sin))
    launch(
        _forward,
        (seq * batch,),
        heads,
        cos,
        sin,
        batch,
        *heads.stride()[:2],
        *cos.stride()[:2],
        *sin.stride()[:2],
        ROTATED=num_rotated,
        HALF=head_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        HEADS=_heads_at_once(num_rotated),
        num_warps=_WARPS,
    )


def gather_rotated_back(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of rotated queries, rotated keys and values to that of the product which they came from.

    Args:
        grad_q: `[seq, batch, heads, head_dim]`, in any order in memory.
        grad_k: `[seq, batch, kv_heads, head_dim]`, likewise.
        grad_v: as `grad_k`.
        cos: `[seq, batch, 1, head_dim]`.
        sin: as `cos`.

    Returns:
        `[seq, batch, (heads + 2 kv_heads) * head_dim]`.
    """
    seq, batch, num_heads, head_dim = grad_q.shape
    num_kv_heads = grad_k.shape[2]
    grads = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (grad_q, grad_k, grad_v)]
    cos, sin = (table.expand(seq, batch, 1, head_dim) for table in (cos, sin))
    gathered = torch.empty(
        (seq, batch, (num_heads + 2 * num_kv_heads) * head_dim), dtype=grad_q.dtype, device=grad_q.device
    )
    launch(
        _backward,
        (seq * batch,),
        gathered,
        *grads,
        cos,
        sin,
        batch,
        *(step for grad in grads for step in grad.stride()[:3]),
        *cos.stride()[:2],
        *sin.stride()[:2],
        QUERIES=num_heads,
        KEYS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        HEADS=_heads_at_once(num_heads),
        num_warps=_WARPS,
    )
    return gathered


def _heads_at_once(heads: int) -> int:
    power: int = triton.next_power_of_2(heads)
    return min(16, power)


@triton.jit
def _rotate(
    source: tl.tensor,
    source_step: tl.tensor,
    target: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    COUNT: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Rotate `COUNT` heads of one token: pairs are (i, i + HALF)."""
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    for start in tl.static_range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        inside = (head < COUNT) & (columns < HALF)
        first = tl.load(source + head * source_step + columns, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + head * source_step + HALF + columns, mask=inside, other=0.0).to(tl.float32)
        at = target + head * (2 * HALF) + columns
        element = target.dtype.element_ty
        tl.store(at, (first * cosine - second * sine).to(element), mask=inside)
        tl.store(at + HALF, (second * cosine + first * sine).to(element), mask=inside)


@triton.jit
def _angle(table: tl.tensor, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr) -> tl.tensor:
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    return tl.load(table + columns, mask=columns < HALF, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    batch: tl.tensor,
    heads_seq: tl.tensor,
    heads_batch: tl.tensor,
    cos_seq: tl.tensor,
    cos_batch: tl.tensor,
    sin_seq: tl.tensor,
    sin_batch: tl.tensor,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    s = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    cosine = _angle(cos + s * cos_seq + b * cos_batch, HALF, HALF_BLOCK)
    sine = _angle(sin + s * sin_seq + b * sin_batch, HALF, HALF_BLOCK)
    token = heads + s * heads_seq + b * heads_batch
    _rotate(token, 2 * HALF, token, cosine, sine, ROTATED, HALF, HALF_BLOCK, HEADS)


@triton.jit
def _backward(
    gathered: tl.tensor,
    grad_q: tl.tensor,
    grad_k: tl.tensor,
    grad_v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    batch: tl.tensor,
    q_seq: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    k_seq: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    v_seq: tl.tensor,
    v_batch: tl.tensor,
    v_head: tl.tensor,
    cos_seq: tl.tensor,
    cos_batch: tl.tensor,
    sin_seq: tl.tensor,
    sin_batch: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    s = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    cosine = _angle(cos + s * cos_seq + b * cos_batch, HALF, HALF_BLOCK)
    # A rotation's transpose is the rotation by the opposite angle.
    sine = -_angle(sin + s * sin_seq + b * sin_batch, HALF, HALF_BLOCK)
    target = gathered + tl.program_id(0).to(tl.int64) * ((QUERIES + 2 * KEYS) * 2 * HALF)
    _rotate(grad_q + s * q_seq + b * q_batch, q_head, target, cosine, sine, QUERIES, HALF, HALF_BLOCK, HEADS)
    target += QUERIES * 2 * HALF
    _rotate(grad_k + s * k_seq + b * k_batch, k_head, target, cosine, sine, KEYS, HALF, HALF_BLOCK, HEADS)
    target += KEYS * 2 * HALF
    # Values are not rotated: by the angle 0 they are copied.
    _rotate(grad_v + s * v_seq + b * v_batch, v_head, target, 1.0, 0.0, KEYS, HALF, HALF_BLOCK, HEADS)

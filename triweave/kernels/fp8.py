"""Tensors to fp8: the largest magnitude in one reading, then both orders in memory in another."""

from __future__ import annotations

import torch
from torch import Tensor

from triweave.kernels.dispatch import launch, num_processors
from triweave.kernels.language import tl, triton

_BLOCK, _WARPS = 4096, 8
_TILE_TOKENS, _TILE_FEATURES, _TILE_WARPS = 128, 128, 8
_PROGRAMS_PER_PROCESSOR = 8
_MOST_PARTS = 2048
"""What each program of a cast compares: more are reduced to one before, by a kernel of their own."""


def largest_magnitudes(x: Tensor) -> Tensor:
    """The largest magnitudes of the parts of a contiguous tensor, float32, some thousand; a NaN may be passed over."""
    x = x.contiguous()
    count = x.numel()
    programs = min(triton.cdiv(count, _BLOCK), _PROGRAMS_PER_PROCESSOR * num_processors(x))
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    launch(_largest, (programs,), x, partial, count, BLOCK=_BLOCK, num_warps=_WARPS)
    return partial


def cast(
    x: Tensor, amax: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """A matrix in fp8, in its own order and transposed, from one reading (float32: from two).

    Args:
        x: `[tokens, features]`, contiguous.
        amax: float32 on the same device, the largest of them at least the largest magnitude of `x`.
        dtype: a float8 type.
        rows: whether `[tokens, features]` is wanted.
        columns: whether `[features, tokens]` is wanted.

    Returns:
        The two, and the float32 scalar that they are multiplied with to give `x` again.
    """
    if rows and columns and x.dtype is torch.float32:
        # Triton 3.6 makes both of one reading of 32 bits wrongly: by columns there are bytes of other elements.
        straight, _, _ = cast(x, amax, dtype, rows=True, columns=False)
        _, turned, inverse_scale = cast(x, amax, dtype, rows=False, columns=True)
        return straight, turned, inverse_scale
    tokens, features = x.shape
    amax = amax if amax.numel() <= _MOST_PARTS else amax.amax()
    inverse_scale = torch.empty((), dtype=torch.float32, device=x.device)
    straight = torch.empty((tokens, features), dtype=dtype, device=x.device) if rows else None
    turned = torch.empty((features, tokens), dtype=dtype, device=x.device) if columns else None
    some = straight if straight is not None else turned
    # Tiles of one block of tokens are neighbours: what is written of a transposed row lies together in the cache.
    grid = (triton.cdiv(tokens, _TILE_TOKENS), triton.cdiv(features, _TILE_FEATURES))
    launch(
        _cast,
        grid,
        x,
        amax,
        amax.numel(),
        some if straight is None else straight,
        some if turned is None else turned,
        inverse_scale,
        tokens,
        features,
        torch.finfo(dtype).max,
        ROWS=rows,
        COLUMNS=columns,
        PARTS=max(2, triton.next_power_of_2(amax.numel())),
        TOKENS=_TILE_TOKENS,
        FEATURES=_TILE_FEATURES,
        num_warps=_TILE_WARPS,
    )
    return straight, turned, inverse_scale


@triton.jit
def _largest(x: tl.tensor, partial: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], dtype=tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    at = program.to(tl.int64) * BLOCK
    for _ in range(tl.cdiv(count - at, step)):
        value = tl.load(x + at + lanes, mask=at + lanes < count, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(value))
        at += step
    tl.store(partial + program, tl.max(top))


@triton.jit
def _cast(
    x: tl.tensor,
    amax: tl.tensor,
    num_parts: tl.tensor,
    straight: tl.tensor,
    turned: tl.tensor,
    inverse_scale: tl.tensor,
    tokens: tl.tensor,
    features: tl.tensor,
    largest: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
) -> None:
    part = tl.arange(0, PARTS)
    top = tl.max(tl.load(amax + part, mask=part < num_parts, other=0.0))
    # The power of two below largest / top: a float32 without its mantissa.
    ratio = largest / tl.maximum(top, 1e-30)
    scale = (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)[None, :]
    inside = (token < tokens) & (feature < features)
    value = tl.load(x + token * features + feature, mask=inside, other=0.0).to(tl.float32) * scale
    if ROWS:
        tl.store(straight + token * features + feature, value.to(straight.dtype.element_ty), mask=inside)
    if COLUMNS:
        tl.store(turned + feature * tokens + token, value.to(turned.dtype.element_ty), mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse_scale, 1.0 / scale)

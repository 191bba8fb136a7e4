"""Products in fp8: matrices of one byte an element with one scale, and what multiplies them.

Scales come from the tensor itself (its largest magnitude) and are powers of two. A power of two changes no digit: a
number is rounded to the same digits whatever its scale, as long as it is no subnormal. Cut over ranks or whole, a
tensor is the same in fp8, so a layout gives what one process gives. Why so: docs/decisions/0011.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triweave.gradients import sum_of
from triweave.kernels.cublaslt import add_fp8_product, can_add_products
from triweave.kernels.dispatch import uses_kernels
from triweave.kernels.noted import noted_amax

VALUES = torch.float8_e4m3fn
"""Of activations and weights: three bits of mantissa."""

GRADIENTS = torch.float8_e5m2
"""Of gradients, whose magnitudes differ more from token to token: two bits, and 2^15 times the range."""

FAST_GRADIENTS = True
"""Whether gradients too are summed in the tensor cores' own registers, of some 14 bits, as outputs are.

Summed exactly they are off by the same 0.155 of a weight gradient, for what rounds them is fp8 itself, and a layer
takes 4 to 5 % longer (`bench/fp8.py`).
"""

_SMALLEST = 1e-30
"""Stands for the largest magnitude of a tensor of zeros."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """`values * inverse_scale`; a product sums over the last dimension of both its matrices."""

    values: Tensor
    """float8 `[outer, inner]`, rows contiguous: the one order that tensor cores read fp8 in."""
    inverse_scale: Tensor
    """float32 scalar."""

    def rows(self, start: int, stop: int) -> Fp8Matrix:
        """Some of its rows."""
        return Fp8Matrix(self.values[start:stop], self.inverse_scale)


def by_rows(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> Fp8Matrix:
    """`[tokens, features]`, for a product that sums over features; `amax` if `amax_of` found it before."""
    rows, _, inverse_scale = _cast(x, dtype, rows=True, amax=amax)
    return Fp8Matrix(_there(rows), inverse_scale)


def by_columns(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> Fp8Matrix:
    """`[features, tokens]`, for a product that sums over tokens; `amax` as above."""
    _, columns, inverse_scale = _cast(x, dtype, columns=True, amax=amax)
    return Fp8Matrix(_there(columns), inverse_scale)


def both_ways(x: Tensor, dtype: torch.dtype) -> tuple[Fp8Matrix, Fp8Matrix]:
    """By rows and by columns, from one reading."""
    rows, columns, inverse_scale = _cast(x, dtype, rows=True, columns=True)
    return Fp8Matrix(_there(rows), inverse_scale), Fp8Matrix(_there(columns), inverse_scale)


def multiply(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, fast: bool, out: Tensor | None = None) -> Tensor:
    """`a b^T`, summed in float32 and rounded to `dtype` once.

    Args:
        a: `[m, inner]`.
        b: `[n, inner]`; at least one of the two is `VALUES`.
        dtype: of the result.
        fast: whether sums stay in the tensor cores; else they are added up in float32 on the way.
        out: `[m, n]` to write to.
    """
    product: Tensor = torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.inverse_scale,
        scale_b=b.inverse_scale,
        out_dtype=dtype,
        use_fast_accum=fast,
        out=out,
    )
    return product


def add_weight_gradient(weight: Tensor, grad_output: Fp8Matrix, x: Fp8Matrix) -> None:
    """Add `grad_output x^T` to the gradient sum of a `[out, in]` weight.

    Args:
        weight: the parameter.
        grad_output: `[out, tokens]`.
        x: `[in, tokens]`.
    """
    total, begins = sum_of(weight)
    if total.is_cuda and (total.is_meta or can_add_products()):
        add_fp8_product(
            total,
            grad_output.values,
            x.values,
            grad_output.inverse_scale,
            x.inverse_scale,
            fast=FAST_GRADIENTS,
            begins=begins,
        )
        return
    product = multiply(grad_output, x, torch.float32, fast=FAST_GRADIENTS)
    if begins:
        total.copy_(product)
    else:
        total.add_(product)


# --- weights ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Casts:
    """What is known of a weight until it changes; `parameter.fp8`."""

    amax: Tensor | None = None
    rows: Fp8Matrix | None = None
    columns: Fp8Matrix | None = None
    are_held: bool = False
    """Whether both stay where they are, of whatever values: graphs read them there."""
    are_former: bool = False
    """Whether they are of values that the weight has no more."""


def weight_by_rows(weight: Tensor) -> Fp8Matrix:
    """`[out, in]`, cast at the first use since the weight changed."""
    renew_casts(weight)
    casts = _casts_of(weight)
    if casts.rows is None:
        rows, _, inverse_scale = _cast(weight, VALUES, rows=True, amax=_weight_amax(weight, casts))
        casts.rows = Fp8Matrix(_there(rows), inverse_scale)
    return casts.rows


def weight_by_columns(weight: Tensor) -> Fp8Matrix:
    """`[in, out]`, cast at the first use since the weight changed."""
    renew_casts(weight)
    casts = _casts_of(weight)
    if casts.columns is None:
        _, columns, inverse_scale = _cast(weight, VALUES, columns=True, amax=_weight_amax(weight, casts))
        casts.columns = Fp8Matrix(_there(columns), inverse_scale)
    return casts.columns


def forget_casts(weight: Tensor, *, changed: bool) -> None:
    """Free what `weight` is in fp8: it was freed itself, or has `changed`. Does nothing where there is none."""
    casts: _Casts | None = getattr(weight, "fp8", None)
    if casts is None:
        return
    if casts.are_held:
        casts.are_former |= changed
    else:
        weight.fp8 = _Casts() if changed else _Casts(casts.amax)  # type: ignore[attr-defined]


def hold_casts(weight: Tensor) -> None:
    """Have both casts of `weight` stay where they are from now on. Does nothing where it was never cast."""
    casts: _Casts | None = getattr(weight, "fp8", None)
    if casts is not None:
        weight_by_rows(weight)
        weight_by_columns(weight)
        casts.are_held = True


def renew_casts(weight: Tensor) -> None:
    """Where casts are held and `weight` has changed, write those of its values in their place."""
    casts: _Casts | None = getattr(weight, "fp8", None)
    if casts is None or not casts.are_former:
        return
    casts.are_former = False
    casts.amax = None
    for held, cast in ((casts.rows, by_rows), (casts.columns, by_columns)):
        if held is not None:
            made = cast(weight, VALUES, _weight_amax(weight, casts))
            held.values.copy_(made.values)
            held.inverse_scale.copy_(made.inverse_scale)


def _casts_of(weight: Tensor) -> _Casts:
    casts: _Casts | None = getattr(weight, "fp8", None)
    if casts is None:
        casts = _Casts()
        weight.fp8 = casts  # type: ignore[attr-defined]
    return casts


def _weight_amax(weight: Tensor, casts: _Casts) -> Tensor:
    if casts.amax is None:
        casts.amax = amax_of(weight)
    return casts.amax


# --- from 16 or 32 bits to 8 ------------------------------------------------------------------------------------------


def amax_of(x: Tensor) -> Tensor:
    """Largest magnitudes of a tensor's parts, float32, one or some thousand: noted by what made it, or found now.

    Those of a tensor's slices one after the other are the tensor's.
    """
    noted = noted_amax(x)
    if noted is not None:
        return noted.view(1)
    if uses_kernels(x):
        from triweave.kernels.fp8 import largest_magnitudes

        return largest_magnitudes(x)
    return x.abs().amax().float().view(1)


def _cast(
    x: Tensor, dtype: torch.dtype, *, rows: bool = False, columns: bool = False, amax: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """See `kernels.fp8.cast`; `x` is `[..., features]`, its other dimensions one."""
    if amax is None:
        amax = amax_of(x)
    x = x.detach().flatten(0, -2).contiguous()
    if uses_kernels(x):
        from triweave.kernels.fp8 import cast

        return cast(x, amax, dtype, rows=rows, columns=columns)
    ratio = torch.finfo(dtype).max / amax.amax().clamp(min=_SMALLEST)
    scale = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)
    values = (x.float() * scale).to(dtype)
    return values if rows else None, values.t().contiguous() if columns else None, scale.reciprocal()


def _there(values: Tensor | None) -> Tensor:
    if values is None:
        raise RuntimeError("it was not asked for")
    return values

"""One product of cuBLASLt's that torch has no call for: matrices in fp8 multiplied and added to float32 sums.

`torch._scaled_mm` overwrites (torch 2.13). Added to what is there by the product itself, a weight gradient of fp8 costs
what one of 16 bits costs: no result of its own, no rounding of it, no pass over it. Names and numbers are those of
cublasLt.h, CUDA 12.0 and later; the library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
"""cudaDataType."""
_COMPUTE_32F, _TRANSPOSED = 68, 1
_TRANSA, _A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM = 3, 17, 18, 25
"""cublasLtMatmulDescAttributes_t."""
_MAX_WORKSPACE_BYTES = 1
"""cublasLtMatmulPreferenceAttributes_t."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class _Product:
    """What cuBLASLt has to know of a product beside its addresses, put together once. Freed with the process."""

    library: Any
    operation: c_void_p
    a: c_void_p
    b: c_void_p
    total: c_void_p
    found: _Heuristic


def can_add_products() -> bool:
    """Whether torch brought cuBLASLt along as a library of its own."""
    return _library() is not None


def add_fp8_product(
    total: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool, begins: bool
) -> None:
    """`total += scale_a scale_b a b^T`, or `total =` it where the sum `begins`; on the current stream.

    One thread at a time: the addresses of the scales are part of what is put together once.

    Args:
        total: float32 `[m, n]`, contiguous.
        a: float8 `[m, inner]`, contiguous.
        b: float8 `[n, inner]`, contiguous; not both of them are float8_e5m2.
        scale_a: float32 scalar on the same GPU.
        scale_b: float32 scalar on the same GPU.
        fast: whether sums stay in the tensor cores; else they are added up in float32 on the way.
        begins: whether what `total` holds is forgotten.

    Raises:
        RuntimeError: cuBLASLt refuses the product.
    """
    if total.is_meta:
        torch.ops.triweave.launched(total)
        return
    (m, inner), n = a.shape, b.shape[0]
    # cuBLASLt's matrices are stored by columns: its A is our b, its B our a, and its result, by columns, ours by rows.
    product = _product(n, m, inner, b.dtype, a.dtype, fast)
    _set(product, _A_SCALE_POINTER, c_void_p(scale_b.data_ptr()))
    _set(product, _B_SCALE_POINTER, c_void_p(scale_a.data_ptr()))
    _check(
        product.library.cublasLtMatmul(
            c_void_p(torch.cuda.current_blas_handle()),  # a handle of cuBLAS is one of cuBLASLt
            product.operation,
            byref(c_float(1.0)),
            c_void_p(b.data_ptr()),
            product.a,
            c_void_p(a.data_ptr()),
            product.b,
            byref(c_float(0.0 if begins else 1.0)),
            c_void_p(total.data_ptr()),
            product.total,
            c_void_p(total.data_ptr()),
            product.total,
            byref(product.found.algorithm),
            # No workspace: products that are worth fp8 are no faster with one (measured on an H200, 32 MiB).
            c_void_p(0),
            c_size_t(0),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )
    )


@cache
def _library() -> Any:
    major = (torch.version.cuda or "0").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None


@cache
def _product(m: int, n: int, inner: int, type_a: torch.dtype, type_b: torch.dtype, fast: bool) -> _Product:
    """As cuBLASLt has it: `[inner, m]` transposed times `[inner, n]`, all by columns."""
    library = _library()
    operation, preference, found, count = c_void_p(), c_void_p(), _Heuristic(), c_int()
    _check(library.cublasLtMatmulDescCreate(byref(operation), _COMPUTE_32F, _TYPES[torch.float32]))

    def layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        made = c_void_p()
        shape = c_uint64(rows), c_uint64(columns), c_int64(rows)
        _check(library.cublasLtMatrixLayoutCreate(byref(made), _TYPES[dtype], *shape))
        return made

    operands = layout(type_a, inner, m), layout(type_b, inner, n), layout(torch.float32, m, n)
    product = _Product(library, operation, *operands, found)
    _set(product, _TRANSA, c_int(_TRANSPOSED))
    _set(product, _FAST_ACCUM, c_int8(fast))
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    room = c_size_t(0)
    _check(library.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE_BYTES, byref(room), c_size_t(8)))
    handle = c_void_p(torch.cuda.current_blas_handle())
    asked = (handle, operation, *operands, product.total, preference, 1)
    _check(library.cublasLtMatmulAlgoGetHeuristic(*asked, byref(found), byref(count)))
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    if not count.value:
        raise RuntimeError(f"cuBLASLt has no product {m} x {n} x {inner} of {type_a} and {type_b}")
    return product


def _set(product: _Product, attribute: int, value: Any) -> None:
    size = c_size_t(ctypes.sizeof(value))
    _check(product.library.cublasLtMatmulDescSetAttribute(product.operation, attribute, byref(value), size))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")

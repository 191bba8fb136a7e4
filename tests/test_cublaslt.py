"""fp8 products that are added to what is there, against a cuBLASLt that reads the addresses it is given.

What a GPU makes of it is measured by `bench/fp8.py`, which prints the error of two additions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from triweave.kernels import cublaslt
from triweave.layers import fp8

STREAM = 77
TYPES = {0: torch.float32, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}
REFUSED = 15


@dataclass
class PretendLibrary:
    """The functions that are called, on addresses of host memory, as cublasLt.h describes them: all by columns."""

    made: list[Any] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    preferences: int = 0

    def _keep(self, to: Any, what: Any) -> int:
        self.made.append(what)
        to._obj.value = len(self.made)
        return 0

    def _of(self, handle: ctypes.c_void_p) -> Any:
        return self.made[(handle.value or 0) - 1]

    def cublasLtMatmulDescCreate(self, to: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._keep(to, {})

    def cublasLtMatmulDescSetAttribute(self, operation: Any, key: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self._of(operation)[key] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, to: Any, dtype: int, rows: Any, columns: Any, leading: Any) -> int:
        return self._keep(to, (TYPES[dtype], rows.value, columns.value, leading.value))

    def cublasLtMatmulPreferenceCreate(self, to: Any) -> int:
        self.preferences += 1
        return self._keep(to, {})

    def cublasLtMatmulPreferenceSetAttribute(self, preference: Any, key: int, value: Any, size: Any) -> int:
        self._of(preference)[key] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        self.preferences -= 1
        return 0

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle: Any, operation: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, count: int, to: Any, of: Any
    ) -> int:
        assert self._of(preference) == {1: 0}, "no workspace is given"
        both_e5m2 = self._of(a)[0] is self._of(b)[0] is torch.float8_e5m2
        of._obj.value = 0 if both_e5m2 else 1
        to._obj.algorithm[0] = 4711
        return 0

    def cublasLtMatmul(self, *given: Any) -> int:
        _, operation, alpha, a, la, b, lb, beta, c, lc, d, ld, algorithm, workspace, room, stream = given
        if algorithm._obj[0] != 4711:
            return REFUSED
        assert not workspace.value
        assert room.value == 0
        self.streams.append(stream.value)
        does = self._of(operation)
        assert does[3] == 1, "fp8 wants the first matrix transposed"
        first, second, former, total = (
            matrix(at.value, *self._of(layout)) for at, layout in ((a, la), (b, lb), (c, lc), (d, ld))
        )
        scale = scalar(does[17]) * scalar(does[18])
        product = first.double().t() @ second.double() * scale
        total.copy_(alpha._obj.value * product + (beta._obj.value * former.double() if beta._obj.value else 0))
        return 0


def at_address(address: int, count: int, dtype: torch.dtype) -> Tensor:
    size = count * dtype.itemsize
    raw = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)


def matrix(address: int, dtype: torch.dtype, rows: int, columns: int, leading: int) -> Tensor:
    """`[rows, columns]`, stored by columns."""
    return at_address(address, leading * columns, dtype).view(columns, leading)[:, :rows].t()


def scalar(address: int) -> float:
    return float(at_address(address, 1, torch.float32)[0])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendLibrary]:
    pretended = PretendLibrary()
    cublaslt._product.cache_clear()
    monkeypatch.setattr(cublaslt, "_library", lambda: pretended)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    yield pretended
    cublaslt._product.cache_clear()


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("a_type", "b_type"), [(fp8.GRADIENTS, fp8.VALUES), (fp8.VALUES, fp8.GRADIENTS)])
def test_product_is_added_and_begins_a_sum(library: PretendLibrary, a_type: torch.dtype, b_type: torch.dtype) -> None:
    """`a b^T` with both scales, over what a former step left and then on top; the second of a shape makes nothing."""
    a, b = fp8.by_rows(random(48, 32, seed=1), a_type), fp8.by_rows(0.01 * random(16, 32, seed=2), b_type)
    expected = (a.values.double() * a.inverse_scale) @ (b.values.double() * b.inverse_scale).t()
    total = torch.full((48, 16), float("nan"))
    for times in (1, 2, 3):
        cublaslt.add_fp8_product(
            total, a.values, b.values, a.inverse_scale, b.inverse_scale, fast=True, begins=times == 1
        )
        torch.testing.assert_close(total.double(), times * expected, rtol=1e-6, atol=1e-9)
        if times == 1:
            made = len(library.made)
    assert len(library.made) == made
    assert library.streams == [STREAM] * 3
    assert library.preferences == 0


def test_fast_and_exact_are_told_apart(library: PretendLibrary) -> None:
    """The attribute that says whether tensor cores sum alone follows what is asked for."""
    a, b = fp8.by_rows(random(16, 16, seed=1), fp8.VALUES), fp8.by_rows(random(16, 16, seed=2), fp8.VALUES)
    for fast in (True, False):
        cublaslt.add_fp8_product(
            torch.zeros(16, 16), a.values, b.values, a.inverse_scale, b.inverse_scale, fast=fast, begins=True
        )
    assert [one[25] for one in library.made if isinstance(one, dict) and 25 in one] == [1, 0]


def test_what_is_not_there_is_named(library: PretendLibrary) -> None:
    """Tensor cores do not multiply two matrices of gradients; the message names the product."""
    a, b = fp8.by_rows(random(16, 32, seed=1), fp8.GRADIENTS), fp8.by_rows(random(48, 32, seed=2), fp8.GRADIENTS)
    with pytest.raises(RuntimeError, match=r"no product 48 x 16 x 32 of torch\.float8_e5m2"):
        cublaslt.add_fp8_product(
            torch.zeros(16, 48), a.values, b.values, a.inverse_scale, b.inverse_scale, fast=True, begins=True
        )


def test_a_refused_product_is_an_error(library: PretendLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status other than 0 is never passed over: the sum would lack a micro-batch."""
    monkeypatch.setattr(library, "cublasLtMatmul", lambda *_: REFUSED)
    a = fp8.by_rows(random(16, 16, seed=1), fp8.VALUES)
    with pytest.raises(RuntimeError, match="status 15"):
        cublaslt.add_fp8_product(
            torch.zeros(16, 16), a.values, a.values, a.inverse_scale, a.inverse_scale, fast=True, begins=True
        )


def test_without_the_library_the_product_is_added_in_float32() -> None:
    """On a CPU: nothing is rounded to 16 bits on the way, and a new step overwrites."""
    weight = torch.zeros(16, 32, dtype=torch.bfloat16)
    weight.main_grad = torch.full((16, 32), float("nan"))  # type: ignore[attr-defined]
    weight.main_grad_is_former = True  # type: ignore[attr-defined]
    grad = fp8.by_columns(random(64, 16, seed=1), fp8.GRADIENTS)
    x = fp8.by_columns(random(64, 32, seed=2), fp8.VALUES)
    expected = (grad.values.double() * grad.inverse_scale) @ (x.values.double() * x.inverse_scale).t()
    for times in (1, 2):
        fp8.add_weight_gradient(weight, grad, x)
        torch.testing.assert_close(
            weight.main_grad.double(),
            times * expected,
            rtol=1e-5,
            atol=1e-5,  # type: ignore[attr-defined]
        )

"""Matrix products as the layers issue them: forward, input gradient, and weight gradient added to a float32 sum."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from triweave.gradients import add_product
from triweave.layers import fp8
from triweave.planner.profile import MatmulPoint, MatmulTable
from triweave.planner.time_matmul import Operands
from triweave.probe.pool import Pool, largest
from triweave.probe.session import Session
from triweave.probe.shapes import Product, products
from triweave.probe.soak import Call, soak

IDLE_S, STEADY_S = 2.0, 3.0


def measure_products(session: Session) -> tuple[MatmulTable, ...]:
    """All products of the family in bf16."""
    wanted = products(session.small)
    left = Pool(session, largest(*(one.m * one.k for one in wanted)))
    right = Pool(session, largest(*(one.k * one.n for one in wanted)))
    out = Pool(session, largest(*(one.m * one.n for one in wanted if one.operands != "TN")))
    sums = Pool(session, largest(*(one.m * one.n for one in wanted if one.operands == "TN")), torch.float32)
    with torch.no_grad():
        seconds = soak(session, [_call(one, left, right, out, sums) for one in wanted], "products in bf16")
    return _tables("bf16", wanted, seconds)


def measure_power(session: Session) -> tuple[float, float]:
    """TFLOP/s of one large product on a card that was idle, and again and again."""
    tokens, out, inner = (64, 128, 64) if session.small else (8192, 28672, 4096)
    x, weight, y = session.random(tokens, inner), session.random(out, inner), session.random(tokens, out)
    flops = 2e-12 * tokens * out * inner
    product = partial(torch.mm, x, weight.t(), out=y)
    product()
    session.meet()
    if not session.small:
        time.sleep(IDLE_S)
    burst_s = session.seconds(product, repeats=8)
    count = 4 if session.small else round(STEADY_S / burst_s)
    for _ in range(count // 2):
        product()
    begin = session.mark()
    for _ in range(count - count // 2):
        product()
    end = session.mark()
    session.wait()
    (steady_s,) = session.worst([begin.until(end) / (count - count // 2)])
    return round(flops / burst_s, 1), round(flops / steady_s, 1)


def _call(one: Product, left: Pool, right: Pool, out: Pool, sums: Pool) -> Call:
    m, n, k = one.m, one.n, one.k
    if one.operands == "TN":
        grad, x = left.take(k, m), right.take(k, n)
        # A parameter of the layers knows its sum; what it holds itself is not read.
        weight = torch.empty(0)
        weight.main_grad = sums.take(m, n)  # type: ignore[attr-defined]
        return Call("product", partial(add_product, weight, grad, x))
    x, y = left.take(m, k), out.take(m, n)
    matrix = right.take(n, k).t() if one.operands == "NT" else right.take(k, n)
    return Call("product", partial(torch.mm, x, matrix, out=y))


def measure_fp8_products(session: Session) -> tuple[MatmulTable, ...]:
    """The products of decoder layers in fp8, casts left out: a weight gradient's includes the pass that adds it."""
    wanted = products(session.small, heads=False)
    most = largest(*(one.m * one.k for one in wanted), *(one.k * one.n for one in wanted))
    values, gradients = (
        Fp8Pool(Pool(session, most).whole.to(dtype), session.device) for dtype in (fp8.VALUES, fp8.GRADIENTS)
    )
    sums = Pool(session, largest(*(one.m * one.n for one in wanted if one.operands == "TN")), torch.float32)
    out = Pool(session, largest(*(one.m * one.n for one in wanted if one.operands != "TN")))
    with torch.no_grad():
        calls = [_fp8_call(one, values, gradients, out, sums) for one in wanted]
        seconds = soak(session, calls, "products in fp8", rounds=5)
    return _tables("fp8", wanted, seconds)


class Fp8Pool:
    """As `Pool`, of matrices in fp8."""

    def __init__(self, whole: Tensor, device: torch.device) -> None:
        self.whole = whole
        self.scale = torch.ones((), device=device)

    def take(self, rows: int, columns: int) -> fp8.Fp8Matrix:
        """`[rows, columns]`."""
        return fp8.Fp8Matrix(self.whole[: rows * columns].view(rows, columns), self.scale)


def _fp8_call(one: Product, values: Fp8Pool, gradients: Fp8Pool, out: Pool, sums: Pool) -> Call:
    m, n, k = one.m, one.n, one.k
    if one.operands == "TN":
        weight = torch.empty(0, dtype=torch.bfloat16)
        weight.main_grad = sums.take(m, n)  # type: ignore[attr-defined]
        return Call("product", partial(fp8.add_weight_gradient, weight, gradients.take(m, k), values.take(n, k)))
    forward = one.operands == "NT"
    a = (values if forward else gradients).take(m, k)
    fast = True if forward else fp8.FAST_GRADIENTS
    y = out.take(m, n)
    return Call("product", partial(fp8.multiply, a, values.take(n, k), y.dtype, fast=fast, out=y))


def _tables(precision: str, wanted: Sequence[Product], seconds: Sequence[float]) -> tuple[MatmulTable, ...]:
    by_operands: defaultdict[Operands, list[MatmulPoint]] = defaultdict(list)
    for one, took in zip(wanted, seconds, strict=True):
        by_operands[one.operands].append((one.m, one.n, one.k, round(took, 9)))
    return tuple(
        MatmulTable("fp8" if precision == "fp8" else "bf16", operands, tuple(sorted(points)))
        for operands, points in by_operands.items()
    )

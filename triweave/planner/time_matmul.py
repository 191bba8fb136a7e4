"""Seconds of one matrix product: tiles, waves, the ramp over K, memory traffic, and measurements where there are."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, exp, log
from typing import Literal

from triweave.planner.machine import Machine

Precision = Literal["bf16", "fp8"]
Operands = Literal["NT", "NN", "TN"]
"""`y = x W^T` (forward), `dx = dy W` (input gradient), `dW = dy^T x` (weight gradient), row-major."""

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 256, 0.85), (128, 64, 0.80), (64, 64, 0.65))
"""Output tiles that cuBLAS chooses from, with the share of the full rate that their data reuse allows."""

K_RAMP = 160
"""Elements of K that filling and draining one tile's pipeline costs."""

OPERAND_RATE = {"NT": 1.0, "NN": 0.99, "TN": 0.96}
"""Relative speed of the three products of a linear layer: 0.74, 0.74 and 0.70 of peak in SimuMax's A100 tables."""

_NEAR = 0.7
"""How far a measurement reaches in the logarithm of the shape (e^0.7 = twice as large in one dimension)."""


@lru_cache(maxsize=65536)
def matmul_s(machine: Machine, m: int, n: int, k: int, precision: Precision, operands: Operands) -> float:
    """Seconds of `[m, k] x [k, n]`, output in bf16.

    The nearest measured shapes correct the model by their own ratio; without any the model stands alone.
    """
    seconds = _model_s(machine, m, n, k, precision) * _correction(machine, m, n, k)
    return seconds / OPERAND_RATE[operands]


def _model_s(machine: Machine, m: int, n: int, k: int, precision: Precision) -> float:
    fp8 = precision == "fp8" and machine.peak_fp8 is not None
    rate = (machine.peak_fp8 or 0.0) * machine.fp8_ceiling if fp8 else machine.peak_bf16 * machine.matmul_ceiling
    per_sm = rate / machine.sms
    compute = min(
        _waves(ceil(m / rows) * ceil(n / columns), machine.sms) * 2 * rows * columns * (k + K_RAMP) / (per_sm * share)
        for rows, columns, share in TILES
    )
    size = 1 if fp8 else 2
    traffic = (size * (m * k + k * n) + 2 * m * n) / machine.hbm_bytes_per_s
    return max(compute, traffic)


def _waves(tiles: int, sms: int) -> float:
    """Rounds of tiles. Of the last round's empty places about half cost time (stream-K, more power for the others)."""
    full, rest = divmod(tiles, sms)
    return float(full) if rest == 0 else full + 0.5 * (rest / sms + 1.0)


def _correction(machine: Machine, m: int, n: int, k: int) -> float:
    """Measured over modelled time near this shape: each measurement weighs by its nearness, the model alone as 0.1."""
    total, weight = 0.0, 0.1
    for known in machine.matmuls:
        distance = (log(m / known.m) ** 2 + log(n / known.n) ** 2 + log(k / known.k) ** 2) / _NEAR**2
        if distance > 20:
            continue
        near = 1 / (distance + 1e-6)
        total += near * log(known.seconds / _model_s(machine, known.m, known.n, known.k, "bf16"))
        weight += near
    return exp(total / weight)

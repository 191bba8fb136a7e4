"""Seconds of one matrix product: tiles, waves, the ramp over K, memory traffic, and measurements where there are."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from math import ceil, exp, log
from typing import Literal, NamedTuple

from triweave.planner.machine import Machine, Matmul, Precision

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

_FAR = 20
"""Squared distance beyond which a measurement says nothing."""


@lru_cache(maxsize=65536)
def matmul_s(machine: Machine, m: int, n: int, k: int, precision: Precision, operands: Operands) -> float:
    """Seconds of `[m, k] x [k, n]`, output in bf16; a weight gradient's is added to a float32 sum.

    A machine's own table gives the time: as measured, or between two numbers of tokens of the same weight straight in
    logarithms. For other weights the nearest measured shapes correct the model by their own ratio; without any the
    model stands alone.
    """
    if (precision, operands) in machine.products:
        return _from_table(machine, (precision, operands), m, n, k)
    if (precision, "NT") in machine.products:
        return _from_table(machine, (precision, "NT"), m, n, k) / OPERAND_RATE[operands]
    seconds = _model_s(machine, m, n, k, precision) * _correction(machine, m, n, k)
    return seconds / OPERAND_RATE[operands]


class _Table(NamedTuple):
    """Measured products of one precision and order of operands."""

    exact: dict[tuple[int, int, int], float]
    by_tokens: dict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]]
    """Tokens and seconds of each weight, tokens ascending."""
    ratios: tuple[tuple[float, float, float, float], ...]
    """Logarithms of a shape's three sizes, and of its measured over its modelled time."""


def _from_table(machine: Machine, key: tuple[Precision, Operands], m: int, n: int, k: int) -> float:
    table = _table(machine, key)
    if (m, n, k) in table.exact:
        return table.exact[m, n, k]
    tokens, weight = _split(key[1], m, n, k)
    counts, seconds = table.by_tokens.get(weight, ((), ()))
    model = _model_s(machine, m, n, k, key[0])
    if not counts:
        return model * exp(_nearest(table, m, n, k))
    at = bisect_left(counts, tokens)
    if 0 < at < len(counts):
        share = log(tokens / counts[at - 1]) / log(counts[at] / counts[at - 1])
        return seconds[at - 1] * exp(share * log(seconds[at] / seconds[at - 1]))
    # Beyond what was measured the model goes on from the last point.
    end = min(at, len(counts) - 1)
    return seconds[end] * model / _model_s(machine, *_join(key[1], counts[end], weight), key[0])


@lru_cache(maxsize=64)
def _table(machine: Machine, key: tuple[Precision, Operands]) -> _Table:
    exact = {(one.m, one.n, one.k): one.seconds for one in machine.products[key]}
    series: dict[tuple[int, int], dict[int, float]] = {}
    for shape, seconds in exact.items():
        tokens, weight = _split(key[1], *shape)
        series.setdefault(weight, {})[tokens] = seconds
    by_tokens = {}
    for weight, points in series.items():
        counts, times = zip(*sorted(points.items()), strict=True)
        by_tokens[weight] = (counts, times)
    ratios = tuple(
        (log(m), log(n), log(k), log(seconds / _model_s(machine, m, n, k, key[0])))
        for (m, n, k), seconds in exact.items()
    )
    return _Table(exact, by_tokens, ratios)


def _split(operands: Operands, m: int, n: int, k: int) -> tuple[int, tuple[int, int]]:
    """Tokens of a product, and the two sizes of its weight."""
    return (k, (m, n)) if operands == "TN" else (m, (n, k))


def _join(operands: Operands, tokens: int, weight: tuple[int, int]) -> tuple[int, int, int]:
    return (*weight, tokens) if operands == "TN" else (tokens, *weight)


def _nearest(table: _Table, m: int, n: int, k: int) -> float:
    """Logarithm of measured over modelled time: of many measurements the near ones count, by distance to the fourth."""
    total, weight = 0.0, 0.1
    x, y, z = log(m), log(n), log(k)
    for a, b, c, ratio in table.ratios:
        distance = ((x - a) ** 2 + (y - b) ** 2 + (z - c) ** 2) / _NEAR**2
        if distance < _FAR:
            near = 1 / (distance + 1e-6) ** 2
            total += near * ratio
            weight += near
    return total / weight


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
        if distance > _FAR:
            continue
        near = 1 / (distance + 1e-6)
        total += near * _log_ratio(machine, known)
        weight += near
    return exp(total / weight)


@lru_cache(maxsize=4096)
def _log_ratio(machine: Machine, known: Matmul) -> float:
    return log(known.seconds / _model_s(machine, known.m, known.n, known.k, "bf16"))

"""Seconds of one layer's attention between its projections, by kernel, heads and sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, log
from statistics import mean
from types import MappingProxyType
from typing import Literal

from triweave.planner.machine import Machine

_NEAR = 0.7
"""How far a measurement reaches in the logarithm of the shape (e^0.7 = twice as long)."""

AttentionName = Literal["unfused", "fused-softmax", "flash1", "triton", "flash2", "flash3", "cudnn"]


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """Speed of a fused kernel: a share of bf16 peak, approached with longer sequences and more work a processor.

    `share = best x s / (s + half_seq) x u / (u + half_work)`, u = batch x heads x seq / 128 / processors.
    """

    forward: float
    backward: float
    half_seq: float
    half_work: float


_AMPERE: Mapping[str, FlashKernel] = MappingProxyType(
    {
        # FlashAttention-2's paper (2307.08691, figures 4 to 6): causal, head size 128, A100.
        "flash2": FlashKernel(0.66, 0.56, 600, 0.6),
        # The same paper measures the first version at 25 to 40 % of peak.
        "flash1": FlashKernel(0.40, 0.35, 600, 0.6),
        "triton": FlashKernel(0.42, 0.285, 600, 0.6),
    }
)
_HOPPER: Mapping[str, FlashKernel] = MappingProxyType(
    {
        # Fitted to four shapes each, measured for this project on H200 (8 to 64 heads, sequence 4096 and 8192).
        "cudnn": FlashKernel(0.746, 0.55, 800, 1.8),
        "flash3": FlashKernel(0.72, 0.53, 800, 1.8),
        "flash2": FlashKernel(0.35, 0.30, 300, 1.8),
        "flash1": FlashKernel(0.20, 0.17, 300, 1.8),
        "triton": FlashKernel(0.22, 0.165, 300, 1.8),
    }
)
_BLACKWELL: Mapping[str, FlashKernel] = MappingProxyType(
    {
        "cudnn": FlashKernel(0.62, 0.42, 800, 3.0),
        "flash3": FlashKernel(0.62, 0.42, 800, 3.0),
        "flash2": FlashKernel(0.17, 0.14, 300, 1.8),
    }
)

SCORE_BYTES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        # Bytes moved a score where the scores exist in memory, forward and backward.
        # Megatron's fused softmax: product written 2, softmax 2 + 2, read again 2; backward 2, 4 + 2, 2 + 2 and 2.
        "fused-softmax": (8.0, 14.0),
        # Plain PyTorch: scale 4, mask 4, to float32 6, softmax 8, to bf16 6, and the two products 4.
        "unfused": (25.0, 33.0),
    }
)


@lru_cache(maxsize=65536)
def attention_s(
    machine: Machine, kernel: AttentionName, batch: int, seq: int, heads: int, head_dim: int
) -> tuple[float, float]:
    """Seconds forward and backward of causal attention over whole sequences on one rank.

    Backward has 2.5 times the forward's FLOPs: four products and the scores again.
    """
    causal = 2.0 * batch * heads * head_dim * seq * seq
    if kernel in SCORE_BYTES:
        scores = float(batch * heads) * seq * seq
        bandwidth = machine.hbm_kernel_bytes_per_s
        # Batched products over whole scores, their traffic counted above.
        product = 2 * causal / (0.6 * machine.peak_bf16)
        forward, backward = SCORE_BYTES[kernel]
        return scores * forward / bandwidth + product, scores * backward / bandwidth + 2 * product
    corrections = _corrections(machine, kernel, batch, seq, heads, head_dim)
    forward, backward = _model_s(machine, kernel, batch, seq, heads, head_dim)
    return forward * corrections[0], backward * corrections[1]


def _model_s(
    machine: Machine, kernel: AttentionName, batch: int, seq: int, heads: int, head_dim: int
) -> tuple[float, float]:
    """Seconds forward and backward of a fused kernel."""
    causal = 2.0 * batch * heads * head_dim * seq * seq
    kernels = _kernels(machine)
    # cuDNN's and FlashAttention-3's need Hopper; PyTorch then runs FlashAttention-2.
    speed = kernels.get(kernel, kernels["flash2"])
    work = batch * heads * seq / 128 / machine.sms
    share = seq / (seq + speed.half_seq) * work / (work + speed.half_work)
    # Narrow heads leave the matrix units waiting for exponentials.
    share *= min(1.0, (head_dim / 128) ** 0.15)
    rate = machine.peak_bf16 * share
    return causal / (rate * speed.forward), 2.5 * causal / (rate * speed.backward)


def _corrections(
    machine: Machine, kernel: AttentionName, batch: int, seq: int, heads: int, head_dim: int
) -> tuple[float, float]:
    """Measured over modelled time near this shape, as `time_matmul` corrects products by their nearest shapes.

    Beyond the longest sequence the model goes on from there: a kernel that is slower than modelled at 32k is no faster
    at 128k.
    """
    totals, weight = [0.0, 0.0], 0.1
    x, y, z = _coordinates(min(seq, _longest(machine, kernel, head_dim)), batch, heads)
    for (a, b, c), ratios in _ratios(machine, kernel, head_dim):
        distance = ((x - a) ** 2 + (y - b) ** 2 + (z - c) ** 2) / _NEAR**2
        if distance > 20:
            continue
        near = 1 / (distance + 1e-6) ** 2
        for which, ratio in enumerate(ratios):
            totals[which] += near * ratio
        weight += near
    return exp(totals[0] / weight), exp(totals[1] / weight)


@lru_cache(maxsize=64)
def _longest(machine: Machine, kernel: AttentionName, head_dim: int) -> float:
    """The longest sequence that was measured; no limit where none was."""
    measured = (one.seq for one in machine.attentions if (one.kernel, one.head_dim) == (kernel, head_dim))
    return max(measured, default=inf)


def _coordinates(seq: float, batch: int, heads: int) -> tuple[float, float, float]:
    """Where a shape lies among others: heads of one sequence and of several are nearly the same work."""
    return log(seq), log(batch * heads), 0.3 * log(batch)


@lru_cache(maxsize=64)
def _ratios(
    machine: Machine, kernel: AttentionName, head_dim: int
) -> tuple[tuple[tuple[float, float, float], tuple[float, float]], ...]:
    """Coordinates of what was measured, and the logarithms of measured over modelled time forward and backward.

    One point for each shape: key/value heads that are read by more or fewer queries count as one.
    """
    found: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for known in machine.attentions:
        if (known.kernel, known.head_dim) == (kernel, head_dim):
            modelled = _model_s(machine, kernel, known.batch, known.seq, known.heads, head_dim)
            ratios = (log(known.forward_s / modelled[0]), log(known.backward_s / modelled[1]))
            found.setdefault((known.seq, known.batch, known.heads), []).append(ratios)
    return tuple(
        (_coordinates(*shape), (mean(one[0] for one in ratios), mean(one[1] for one in ratios)))
        for shape, ratios in found.items()
    )


def _kernels(machine: Machine) -> Mapping[str, FlashKernel]:
    if machine.name.startswith("a100"):
        return _AMPERE
    return _HOPPER if machine.name.startswith("h") else _BLACKWELL

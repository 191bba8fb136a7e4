"""How much of a GPU's communication nothing else hides, from the events of torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

Interval = tuple[float, float]
"""Start and end, in one unit of time."""


class Communication(NamedTuple):
    """Seconds on one GPU."""

    total_s: float
    """A NCCL kernel or a copy between GPUs runs."""
    exposed_s: float
    """One of them runs, and nothing that computes does."""
    busy_s: float
    """Any kernel runs."""


def communication(events: Iterable[dict[str, Any]]) -> Communication:
    """Sum up a trace.

    Args:
        events: `traceEvents` of a Chrome trace of one process and one GPU. Kernels, copies and fills count as work of
            the GPU. Copies from device to device count as communication: copies by copy engines out of a peer's memory
            are called so too, and a step of ours makes hardly any other.
    """
    moving: list[Interval] = []
    other: list[Interval] = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start = float(event["ts"])
            moves = any(word in event["name"] for word in ("nccl", "Memcpy DtoD", "Memcpy PtoP"))
            (moving if moves else other).append((start, start + float(event["dur"])))
    total, computing, busy = covered(moving), covered(other), covered([*moving, *other])
    microsecond = 1e-6
    return Communication(total * microsecond, (busy - computing) * microsecond, busy * microsecond)


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of `intervals`."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length

"""What a trace says of communication that nothing hides."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
REDUCE = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exposed", ROOT / "bench" / "exposed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = _load()


def event(name: str, start: float, duration: float, category: str = "kernel", phase: str = "X") -> dict[str, Any]:
    """One entry of a Chrome trace; times in microseconds."""
    return {"ph": phase, "cat": category, "name": name, "ts": start, "dur": duration}


def test_exposed_is_what_no_computation_covers() -> None:
    """Of a reduction from 5 to 15 beside products from 0 to 8 and 12 to 20, the four between are exposed."""
    events = [
        event("gemm", 0, 8),
        event("gemm", 12, 8),
        event(REDUCE, 5, 10),
        # Neither on the GPU: what the host did, and a range that a program named.
        event("c10d::_reduce_scatter_base_", 0, 100, "cpu_op"),
        event("nccl:_reduce_scatter_base", 0, 100, "gpu_user_annotation"),
        {"ph": "i", "cat": "kernel", "name": "instant", "ts": 3},
    ]
    assert bench.communication(events) == pytest.approx((10e-6, 4e-6, 20e-6))


def test_two_collectives_at_once_count_once() -> None:
    """Overlapping collectives on two streams expose the time that either runs, and a fill hides them."""
    events = [event(REDUCE, 0, 6), event(REDUCE, 4, 6), event("Memset (Device)", 8, 4, "gpu_memset")]
    assert bench.communication(events) == pytest.approx((10e-6, 8e-6, 12e-6))


@pytest.mark.parametrize("name", ["Memcpy DtoD (Device -> Device)", "Memcpy PtoP (Device -> Device)"])
def test_copies_between_gpus_are_communication(name: str) -> None:
    """What copy engines move counts as what NCCL moves; tokens on their way from the host do not."""
    events = [event("gemm", 0, 8), event(name, 5, 10, "gpu_memcpy"), event("Memcpy HtoD", 14, 4, "gpu_memcpy")]
    assert bench.communication(events) == pytest.approx((10e-6, 6e-6, 18e-6))


def test_empty_trace() -> None:
    """Without a GPU nothing is exposed."""
    assert bench.communication([event("aten::mm", 0, 10, "cpu_op")]) == (0, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.booleans()), max_size=12))
def test_exposed_counted_tick_by_tick(kernels: list[tuple[int, int, bool]]) -> None:
    """On whole microseconds the sums are those of looking at every microsecond."""
    ticks = [({nccl for start, length, nccl in kernels if start <= tick < start + length}) for tick in range(60)]
    expected = [
        sum(condition(tick) for tick in ticks) * 1e-6
        for condition in (
            lambda on: True in on,
            lambda on: on == {True},
            bool,
        )
    ]
    events = [event(REDUCE if nccl else "gemm", start, length) for start, length, nccl in kernels]
    assert bench.communication(events) == pytest.approx(tuple(expected))

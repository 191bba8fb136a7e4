"""Seconds that copies to and from host memory add to a stage's passes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from triweave.errors import InputError, Problem
from triweave.layout import Layout
from triweave.model_spec import ModelSpec
from triweave.planner.assumptions import OURS
from triweave.planner.memory_stage import layer_offloaded
from triweave.planner.sizes import sizes_of
from triweave.planner.time_collectives import overlapped_s
from triweave.planner.time_parts import Place, Work

SLOWDOWN = 0.0056
"""What products lose beside copies, as a share of the time that these take: by copy engines of an H200, from GPU to GPU
and six times as fast as to the host (`triweave probe`, the profile h200-x2)."""


class Offloaded(NamedTuple):
    """What every layer of a layout moves."""

    bytes: tuple[int, ...]
    """Of each tensor."""
    split: bool
    """Whether weight gradients are computed later than the rest of a layer's backward, which then hides less."""


def offloaded_of(spec: ModelSpec, layout: Layout, seq_len: int) -> Offloaded | None:
    """What `layout` moves of each layer, in bf16; None where nothing."""
    if not layout.offload:
        return None
    sizes = layer_offloaded(sizes_of(spec, layout, seq_len, "bfloat16", OURS), OURS)
    return Offloaded(tuple(sizes.values()), layout.schedule == "zero-bubble")


def offload_s(place: Place, layer: Work, num_layers: int, moved: Offloaded) -> tuple[float, float]:
    """What a stage's forward and backward take beyond their own work, for one micro-batch.

    A layer's tensors leave while the next layer computes, and come back while the one behind it runs backward; the
    first ones to come back have the action before. Where a layer's copies take longer than a layer, each layer but one
    waits for the rest: nothing waits for the last layer to leave, and the first one to come back is still there (the
    order of events, `tests/test_offload_time.py`; `bench/offload.py` on an H200). That copies of all GPUs of a node run
    at once at this speed was not measured.

    Args:
        place: where the layers run.
        layer: one of them.
        num_layers: of the stage.
        moved: what each moves.

    Raises:
        InputError: nothing is known of the speed of copies to the host.
    """
    copies = sum(_copy_s(place, size) for size in moved.bytes)
    slowdown = place.trainer.slowdowns.get("copies", SLOWDOWN) if place.trainer is not None else SLOWDOWN
    later = 0.0 if moved.split else layer.backward_weight.total
    backward = layer.recompute.total + layer.backward_input.total + later
    return (
        (num_layers - 1) * overlapped_s(copies, layer.forward.total, slowdown),
        (num_layers - 1) * overlapped_s(copies, backward, slowdown),
    )


@lru_cache(maxsize=4096)
def _copy_s(place: Place, size: int) -> float:
    """Seconds of one tensor, one way: as measured, or by the bus."""
    if place.trainer is not None and place.trainer.host_copy is not None:
        return place.trainer.host_copy(size)
    if not place.machine.host_bytes_per_s:
        rule = "has no price: give gpu.pcie_gb_per_s in a cluster file, or a profile with host copies (probe)"
        raise InputError(Problem("layout.offload", place.machine.name, rule))
    return size / place.machine.host_bytes_per_s

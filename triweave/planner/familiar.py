"""The layouts that everybody tries first, priced beside what the search finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from triweave.errors import divisors
from triweave.layout import Layout, even_layers
from triweave.planner.assumptions import GIB
from triweave.planner.offloads import fastest_that_fits
from triweave.planner.request import (
    SMALLER_MOMENTS,
    Candidate,
    Request,
    legal_problems,
    price,
    with_smaller_moments,
)
from triweave.planner.words import as_typed

MAX_STAGES = 8
"""Deeper pipelines are nobody's first try."""


@dataclass(frozen=True, slots=True)
class Familiar:
    """One such layout."""

    name: str
    layout: Layout
    verdict: str
    """Whether it fits and how fast it is, beside the first answer."""


def familiar_layouts(request: Request, first: Candidate | None) -> list[Familiar]:
    """FSDP, FSDP with whole layers recomputed, and tensor parallel inside a node with pipeline parallel across."""
    return [
        Familiar(name, layout, _verdict(request, layout, first))
        for name, layout in _layouts(request)
        if first is None or layout != first.layout
    ]


def _layouts(request: Request) -> Iterator[tuple[str, Layout]]:
    cluster, num_layers = request.cluster, request.spec.num_hidden_layers
    world, node = cluster.world_size, cluster.gpus_per_node
    fsdp = Layout(dp=world, shard="full", layers=(num_layers,))
    yield f"FSDP over all {world} GPUs", fsdp
    yield "FSDP with whole layers recomputed", replace(fsdp, recompute=("layer",))
    if node == 1:
        return
    pp = max(size for size in divisors(cluster.num_nodes) if size <= min(MAX_STAGES, num_layers))
    grid = Layout(tp=node, pp=pp, dp=cluster.num_nodes // pp, layers=even_layers(num_layers, pp))
    across = f" x pipeline parallel {pp} across them" if pp > 1 else ""
    yield f"tensor and sequence parallel {node} inside nodes{across}", grid


def _verdict(request: Request, layout: Layout, first: Candidate | None) -> str:
    if problems := legal_problems(request, layout):
        return f"not legal: {as_typed(problems[0])}"
    one = price(request, layout)
    fullest = max(one.memory, key=lambda stage: stage.used_bytes)
    capacity = request.capacity_bytes / GIB
    needed = fullest.used_bytes / GIB
    speed = f"{one.time.step_s:.2f} s, MFU {100 * one.time.mfu.causal:.1f} % causal"
    if not one.fits:
        over = f"{needed - capacity:.1f} too many" if needed > capacity else "too near to be safe"
        told = f"OUT OF MEMORY at the {fullest.at}: {needed:.1f} GiB of {capacity:.1f}, {over} (else {speed})"
        found = fastest_that_fits(request, layout) or _with_smaller_moments(request, layout)
        return told if found is None else f"{told}; with {found[0]} it fits: {_fits(found[1], first)}"
    return f"fits with {needed:.1f} GiB of {capacity:.1f}: {speed}{_beside(one, first)}"


def _with_smaller_moments(request: Request, layout: Layout) -> tuple[str, Candidate] | None:
    smaller = with_smaller_moments(request)
    one = price(smaller, layout) if smaller is not None else None
    return (SMALLER_MOMENTS, one) if one is not None and one.fits else None


def _fits(one: Candidate, first: Candidate | None) -> str:
    return f"{one.peak_bytes / GIB:.1f} GiB, step {one.time.step_s:.2f} s{_beside(one, first)}"


def _beside(one: Candidate, first: Candidate | None) -> str:
    if first is None:
        return ""
    more = 100 * (one.time.step_s / first.time.step_s - 1)
    return f", {abs(more):.0f} % {'slower' if more >= 0 else 'faster'} than the first"

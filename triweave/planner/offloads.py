"""The same layout with some of what its layers keep in host memory: looked at where it would not fit otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from triweave.layout import Layout, Offload, Recompute
from triweave.planner.assumptions import GIB
from triweave.planner.request import Candidate, Request, has_room_for, legal_problems, most_used_bytes, price

CHOICES: tuple[tuple[tuple[Recompute, ...] | None, tuple[Offload, ...]], ...] = (
    (None, ("mlp",)),
    (None, ("attention", "mlp")),
    (("norm", "swiglu"), ("mlp",)),
    (("norm", "swiglu"), ("attention", "mlp")),
    (("layer",), ("layer",)),
)
"""What is recomputed (None: as it is) and what is offloaded. What is cheap to make again need not travel."""


def offloaded_layouts(request: Request, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """What changes, and the layout with it, where that is legal."""
    if layout.offload:
        return
    for recompute, offload in CHOICES:
        changed = replace(layout, offload=offload)
        words = spell_offload(changed)
        if recompute is not None:
            changed = replace(changed, recompute=recompute)
            if recompute == layout.recompute and offload != ("layer",):
                continue
            if recompute != layout.recompute:
                words = f"recompute [{', '.join(recompute)}] and {words}"
        if not legal_problems(request, changed):
            yield words, changed


def fastest_that_fits(request: Request, layout: Layout) -> tuple[str, Candidate] | None:
    """Of `offloaded_layouts` the fastest that fits, with what changes."""
    fitting = [
        (words, price(request, one))
        for words, one in offloaded_layouts(request, layout)
        if has_room_for(request, most_used_bytes(request, one))
    ]
    return min(fitting, key=lambda pair: pair[1].time.step_s, default=None)


def spell_offload(layout: Layout) -> str:
    """`offload [attention, mlp]`."""
    return f"offload [{', '.join(layout.offload)}]"


def what_it_pins(request: Request, candidate: Candidate) -> Iterator[str]:
    """Host memory of a rank and of the fullest node."""
    if not candidate.layout.offload:
        return
    layout, node = candidate.layout, min(request.cluster.gpus_per_node, request.cluster.world_size)
    by_stage = [stage.host_bytes for stage in candidate.memory]
    by_rank = [by_stage[layout.coordinates(rank).pp] for rank in range(layout.world_size)]
    fullest = max(sum(by_rank[start : start + node]) for start in range(0, layout.world_size, node))
    yield (
        f"{spell_offload(layout)} pins up to {max(by_stage) / GIB:.1f} GiB of host memory a rank,"
        f" {fullest / GIB:.0f} GiB a node of {node}, which must have it to spare"
    )

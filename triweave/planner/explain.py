"""Why: where a layout's time and memory go, what holds it back, and what single change would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from triweave.layout import Layout, even_layers
from triweave.planner.assumptions import GIB
from triweave.planner.request import Candidate, Request, price, time_of
from triweave.planner.search import RECOMPUTE, SHARDS
from triweave.rules import layout_problems

NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound operations",
    "tensor_parallel": "exposed tensor-parallel communication",
    "context_parallel": "exposed context-parallel communication",
    "host": "waiting for kernel launches",
    "pipeline": "pipeline bubble, imbalance and messages",
    "data_parallel": "exposed data-parallel communication",
    "optimizer": "optimizer",
}
"""What the parts of a step are called."""


def why(request: Request, candidate: Candidate) -> list[str]:
    """Sentences about one layout, the most telling first."""
    lines = [_where_time_goes(candidate), _where_memory_goes(request, candidate)]
    if not candidate.fits:
        lines += _what_would_fit(request, candidate)
    else:
        lines += _what_would_be_faster(request, candidate)
    return lines


def _where_time_goes(candidate: Candidate) -> str:
    parts = asdict(candidate.time.breakdown)
    largest = sorted(parts.items(), key=lambda item: -item[1])
    step = candidate.time.step_s
    told = [f"{NAMES[name]} {100 * seconds / step:.0f} %" for name, seconds in largest if seconds >= 0.02 * step]
    return "time: " + ", ".join(told)


def _where_memory_goes(request: Request, candidate: Candidate) -> str:
    rank, fullest = max(enumerate(candidate.memory), key=lambda item: item[1].used_bytes)
    largest = sorted(fullest.components.items(), key=lambda item: -item[1])[:4]
    told = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    room = (request.capacity_bytes - fullest.used_bytes) / GIB
    verdict = f"{room:.1f} GiB to spare" if room >= 0 else f"{-room:.1f} GiB too many"
    return f"memory: stage {rank} needs {fullest.used_bytes / GIB:.1f} GiB ({told}), at the {fullest.at}; {verdict}"


def _what_would_fit(request: Request, candidate: Candidate) -> Iterator[str]:
    """Single changes that make the layout fit, with their price."""
    found = False
    for change, layout in _single_changes(request, candidate.layout):
        other = price(request, layout)
        if other.fits:
            found = True
            yield (
                f"fits with {change}: {other.peak_bytes / GIB:.1f} GiB, step {other.time.step_s:.2f} s"
                f" ({100 * (other.time.step_s / candidate.time.step_s - 1):+.0f} %)"
            )
    if not found:
        yield "no single change makes it fit"


def _single_changes(request: Request, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Legal layouts one step away that take less memory."""
    for recompute in RECOMPUTE[1:]:
        if recompute != layout.recompute:
            yield f"recompute [{', '.join(recompute)}]", replace(layout, recompute=recompute)
    for shard in SHARDS:
        if layout.dp > 1 and shard != layout.shard:
            yield f"shard {shard}", replace(layout, shard=shard)
    for axis in ("tp", "pp"):
        if layout.dp % 2 == 0:
            tp, pp = (2 * layout.size(one) if one == axis else layout.size(one) for one in ("tp", "pp"))
            moved = replace(layout, dp=layout.dp // 2, tp=tp, pp=pp)
            moved = replace(moved, layers=even_layers(request.spec.num_hidden_layers, moved.num_stages))
            if _is_legal(request, moved):
                yield f"{axis} {moved.size(axis)} in place of dp {layout.dp}", moved
    if layout.micro_batch > 1:
        smaller = replace(layout, micro_batch=1)
        if _is_legal(request, smaller):
            yield "micro-batch 1", smaller


def _what_would_be_faster(request: Request, candidate: Candidate) -> Iterator[str]:
    """What the layout would gain from more memory, a longer batch or more nodes."""
    step, layout = candidate.time.step_s, candidate.layout
    if layout.recompute:
        without = price(request, replace(layout, recompute=()))
        yield (
            f"recomputing {', '.join(layout.recompute)} costs {100 * (1 - without.time.step_s / step):.1f} % of"
            f" the step and saves {(without.peak_bytes - candidate.peak_bytes) / GIB:.1f} GiB"
        )
    longer = replace(request, global_batch=2 * request.global_batch)
    gain = 2 * step / time_of(longer, layout).step_s - 1
    if gain > 0.01:
        yield f"twice the global batch would give {100 * gain:.0f} % more tokens a second"
    wider, doubled = request.with_cluster(2 * request.cluster.num_nodes), replace(layout, dp=2 * layout.dp)
    if layout.dp > 1 and _is_legal(wider, doubled):
        speed = step / time_of(wider, doubled).step_s
        yield f"twice the nodes would make the same step {speed:.2f} times as fast"


def _is_legal(request: Request, layout: Layout) -> bool:
    return not layout_problems(
        request.spec,
        layout,
        world_size=request.cluster.world_size,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        gpus_per_node=request.cluster.gpus_per_node,
        tp_across_nodes=request.tp_across_nodes,
    )

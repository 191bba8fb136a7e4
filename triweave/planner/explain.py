"""Why: where a layout's time and memory go, what holds it back, and what single change would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from triweave.layout import Layout, even_layers
from triweave.planner.assumptions import GIB
from triweave.planner.graphs import what_graphs_do
from triweave.planner.offloads import fastest_that_fits, offloaded_layouts, what_it_pins
from triweave.planner.request import (
    MAX_OOM_PROBABILITY,
    SMALLER_MOMENTS,
    Candidate,
    Request,
    legal_problems,
    most_that_fits,
    most_used_bytes,
    price,
    time_of,
    with_smaller_moments,
)
from triweave.planner.space import MAX_MICRO_BATCH, RECOMPUTE, SHARDS

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
    "offload": "copies to and from host memory",
}
"""What the parts of a step are called."""

_TOLD = 0.02
"""Parts of a step below this share are not told."""
_GAIN = 0.99
"""What would make a step shorter by less is not told."""


def why(request: Request, candidate: Candidate) -> list[str]:
    """Sentences about one layout, the most telling first."""
    lines = [_where_time_goes(candidate), _where_memory_goes(request, candidate)]
    lines += what_it_pins(request, candidate)
    lines += what_graphs_do(request, candidate)
    lines += _what_its_axes_are_for(request, candidate)
    if not candidate.fits:
        lines += _what_would_fit(request, candidate)
    else:
        lines += _what_would_be_faster(request, candidate)
    return lines


def what_it_loses(first: Candidate, other: Candidate) -> str:
    """How much slower a runner-up is than the first answer, and in which parts of the step."""
    step = first.time.step_s
    parts = {name: seconds - asdict(first.time.breakdown)[name] for name, seconds in _parts(other)}
    told = [
        f"{seconds:+.2f} s {NAMES[name]}"
        for name, seconds in sorted(parts.items(), key=lambda item: -abs(item[1]))
        if abs(seconds) >= 5e-4 * step
    ]
    slower = f"{100 * (other.time.step_s / step - 1):.1f} % slower than the first"
    return f"{slower}: {', '.join(told[:4])}" if told else slower


def _parts(candidate: Candidate) -> list[tuple[str, float]]:
    """Parts of the step and their seconds, the largest first."""
    return sorted(asdict(candidate.time.breakdown).items(), key=lambda item: -item[1])


def _where_time_goes(candidate: Candidate) -> str:
    step = candidate.time.step_s
    told = [f"{NAMES[name]} {100 * part / step:.0f} %" for name, part in _parts(candidate) if part >= _TOLD * step]
    return "time: " + ", ".join(told)


def _where_memory_goes(request: Request, candidate: Candidate) -> str:
    rank, fullest = max(enumerate(candidate.memory), key=lambda item: item[1].used_bytes)
    largest = sorted(fullest.components.items(), key=lambda item: -item[1])[:4]
    told = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    room = (request.capacity_bytes - fullest.used_bytes) / GIB
    verdict = f"{room:.1f} GiB to spare" if room >= 0 else f"{-room:.1f} GiB too many"
    if room >= 0 and not candidate.fits:
        most = most_that_fits(request) / GIB
        verdict += (
            f", and too near: the prediction is off by {100 * fullest.uncertainty:.1f} % (one sigma), so that only"
            f" {most:.1f} GiB run out in fewer than {100 * MAX_OOM_PROBABILITY:.0f} % of cases"
        )
    return f"memory: stage {rank} needs {fullest.used_bytes / GIB:.1f} GiB ({told}), at the {fullest.at}; {verdict}"


def _what_its_axes_are_for(request: Request, candidate: Candidate) -> Iterator[str]:
    """What the unusual axes of a layout buy: the same ranks used the ordinary way, and what that would take."""
    layout = candidate.layout
    if layout.cp > 1:
        plain = replace(layout, cp=1, dp=layout.replicas, shard_group=None)
        yield _instead(request, candidate, f"context parallel {layout.cp}", f"data parallel {plain.dp}", plain)
    if layout.uses_shard_groups:
        whole = replace(layout, shard_group=None)
        among = f"sharing among {layout.shard_ranks} of {layout.replicas} ranks"
        yield _instead(request, candidate, among, "sharing among all", whole)
    node = request.cluster.gpus_per_node
    if layout.tp > node:
        inside = replace(layout, tp=node, dp=layout.dp * layout.tp // node, shard_group=None)
        yield _instead(request, candidate, f"tensor parallel {layout.tp} across nodes of {node}", f"tp {node}", inside)


def _instead(request: Request, candidate: Candidate, used: str, other: str, layout: Layout) -> str:
    """`used` in place of `other`: what the step and the fullest stage of each take."""
    if problems := legal_problems(request, layout):
        return f"{used}: {other} in its place is not legal ({problems[0].rule})"
    plain = price(request, layout)
    step, peak = candidate.time.step_s, candidate.peak_bytes / GIB
    verdict = "" if plain.fits else f", and {plain.peak_bytes / GIB:.1f} GiB do not fit"
    return (
        f"{used}: {peak:.1f} GiB and {step:.2f} s; {other} in its place takes {plain.peak_bytes / GIB:.1f} GiB and"
        f" {plain.time.step_s:.2f} s ({_change(plain.time.step_s, step)}){verdict}"
    )


def _change(seconds: float, of: float) -> str:
    return f"{100 * (seconds / of - 1):+.0f} %"


def _what_would_fit(request: Request, candidate: Candidate) -> list[str]:
    """Single changes that make the layout fit, with their price, the cheapest first."""
    tried = [(change, price(request, layout)) for change, layout in _single_changes(request, candidate.layout)]
    if (smaller := with_smaller_moments(request)) is not None:
        tried.append((SMALLER_MOMENTS, price(smaller, candidate.layout)))
    fitting = sorted(((change, one) for change, one in tried if one.fits), key=lambda item: item[1].time.step_s)
    if fitting:
        step = candidate.time.step_s
        return [
            f"fits with {change}: {one.peak_bytes / GIB:.1f} GiB, step {one.time.step_s:.2f} s"
            f" ({_change(one.time.step_s, step)})"
            for change, one in fitting
        ]
    if not tried:
        return ["no single change makes it fit"]
    change, nearest = min(tried, key=lambda item: item[1].peak_bytes)
    return [f"no single change makes it fit; {change} comes nearest, with {nearest.peak_bytes / GIB:.1f} GiB"]


def _single_changes(request: Request, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Legal layouts one step away that may take less memory."""
    changes: list[tuple[str, Layout]] = []
    for recompute in RECOMPUTE[1:]:
        if recompute != layout.recompute:
            changes.append((f"recompute [{', '.join(recompute)}]", replace(layout, recompute=recompute)))
    if layout.replicas > 1:
        group = None if layout.shard == "none" else layout.shard_group
        for shard in SHARDS:
            if shard != layout.shard:
                changes.append((f"shard {shard}", replace(layout, shard=shard, shard_group=group)))
    if layout.uses_shard_groups:
        changes.append((f"sharing among all {layout.replicas} ranks", replace(layout, shard_group=None)))
    if layout.dp % 2 == 0:
        for axis, size in (("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp)):
            moved = replace(layout, dp=layout.dp // 2, **{axis: 2 * size})  # type: ignore[arg-type]
            moved = replace(moved, layers=even_layers(request.spec.num_hidden_layers, moved.num_stages))
            changes.append((f"{axis} {2 * size} and dp {moved.dp} in place of dp {layout.dp}", moved))
    if layout.micro_batch > 1:
        changes.append(("micro-batch 1", replace(layout, micro_batch=1)))
    changes += offloaded_layouts(request, layout)
    return ((change, other) for change, other in changes if not legal_problems(request, other))


def _what_would_be_faster(request: Request, candidate: Candidate) -> Iterator[str]:
    """What the layout would gain from more memory, a longer batch or more nodes."""
    step, layout = candidate.time.step_s, candidate.layout
    if layout.recompute:
        without = price(request, replace(layout, recompute=()))
        costs = 100 * (1 - without.time.step_s / step)
        # What is offloaded and not made again would have to be copied.
        shorter = f"makes the step {-costs:.1f} % shorter"
        told = f"costs {costs:.1f} % of the step" if costs >= 0 else shorter
        saved = (without.peak_bytes - candidate.peak_bytes) / GIB
        yield f"recomputing {', '.join(layout.recompute)} {told} and saves {saved:.1f} GiB"
    yield from _with_more_memory(request, candidate)
    longer = replace(request, global_batch=2 * request.global_batch)
    gain = 2 * step / time_of(longer, layout).step_s - 1
    if gain > 1 - _GAIN:
        yield f"twice the global batch would give {100 * gain:.0f} % more tokens a second"
    wider, doubled = request.with_cluster(2 * request.cluster.num_nodes), replace(layout, dp=2 * layout.dp)
    if not legal_problems(wider, doubled):
        speed = step / time_of(wider, doubled).step_s
        yield f"twice the nodes would make the same step {speed:.2f} times as fast"


def _with_more_memory(request: Request, candidate: Candidate) -> Iterator[str]:
    """The fastest of the layouts that up to twice the memory would allow: larger micro-batches, less recomputation."""
    layout = candidate.layout
    sizes = [layout.micro_batch << times for times in range(4) if layout.micro_batch << times <= MAX_MICRO_BATCH]
    larger = [replace(layout, recompute=recompute, micro_batch=size) for size in sizes for recompute in RECOMPUTE]
    roomier = [one for one in larger if one != layout and not legal_problems(request, one)]
    timed = sorted(((time_of(request, one).step_s, number) for number, one in enumerate(roomier)))
    step, most = candidate.time.step_s, most_that_fits(request)
    for seconds, number in timed:
        one = roomier[number]
        more = most_used_bytes(request, one) - most
        if seconds < _GAIN * step and more <= request.capacity_bytes:
            again = f"recompute [{', '.join(one.recompute)}]" if one.recompute else "nothing recomputed"
            needs = f"{more / GIB:.1f} GiB more memory would allow" if more > 0 else "faster, and it fits:"
            yield f"{needs} micro-batch {one.micro_batch} and {again}: {seconds:.2f} s ({_change(seconds, step)})"
            if more > 0 and (found := fastest_that_fits(request, one)) and found[1].time.step_s < _GAIN * step:
                change, offloaded = found
                yield (
                    f"with {change} micro-batch {one.micro_batch} fits: {offloaded.peak_bytes / GIB:.1f} GiB,"
                    f" {offloaded.time.step_s:.2f} s ({_change(offloaded.time.step_s, step)})"
                )
            return

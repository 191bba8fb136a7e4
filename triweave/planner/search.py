"""Finds the fastest layouts that fit: the whole legal space, best first, and no more of it than needs pricing.

Layouts that differ only in the order of the pipeline (schedule, virtual stages, layer map) are a family. No member's
step is shorter than the family's plain 1F1B step without what it waits in the pipeline (nor, with recompute, than
its own step without), so families are visited from the lowest such bound on, and the search ends at the first
bound that is no better than the worst answer it would still report. What cannot hold even its weights, gradients and
optimizer states is never priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from triweave.errors import divisors
from triweave.layout import Layout, Recompute, Schedule, Shard, balanced_layers, even_layers
from triweave.planner.request import (
    MAX_OOM_PROBABILITY,
    Candidate,
    Request,
    memory_of,
    oom_probability,
    price,
    time_of,
)
from triweave.rules import layout_problems

RECOMPUTE: tuple[tuple[Recompute, ...], ...] = (
    (),
    ("norm", "swiglu"),
    ("norm", "swiglu", "attention"),
    ("mlp",),
    ("norm", "mlp"),
    ("layer",),
)
"""From the cheapest to the most sparing."""

SHARDS: tuple[Shard, ...] = ("optimizer", "gradients", "full")
"""`none` is `optimizer` with more memory and the same traffic, so it is never better."""

MAX_MICRO_BATCH = 8
MAX_VIRTUAL_STAGES = 8

Progress = Callable[[int, int], None]
"""Told how many layouts are priced, of how many."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that is no answer, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What the search found."""

    candidates: tuple[Candidate, ...]
    """Fastest first; all fit."""
    rejected: tuple[Rejected, ...]
    """One for each grid that has no answer."""
    num_considered: int
    """Layouts of the legal space, not counting ways to recompute."""


def search(request: Request, top: int = 5, progress: Progress | None = None) -> Plan:
    """The `top` fastest layouts that fit.

    Args:
        request: the question.
        top: answers wanted; each is another grid, micro-batch, schedule, layer map or shard level.
        progress: told now and then how far it is.
    """
    families: dict[tuple[object, ...], list[Layout]] = {}
    for layout in layouts(request):
        key = (layout.tp, layout.pp, layout.dp, layout.micro_batch, layout.shard)
        families.setdefault(key, []).append(layout)
    rejected: dict[tuple[int, int, int], Rejected] = {}
    refused: set[Layout] = set()
    bounded: list[tuple[float, list[Layout]]] = []
    for number, members in enumerate(families.values()):
        plain = members[0]
        reason = _problem(request, plain) or _states_too_large(request, plain)
        if reason:
            refused.add(plain)
            rejected.setdefault(_grid(plain), Rejected(plain, reason))
        else:
            bounded.append((_bound(request, members), members))
        if progress is not None:
            progress(number, len(families))
    bounded.sort(key=lambda item: item[0])

    best: list[Candidate] = []
    fitting: list[tuple[float, list[Layout]]] = []
    # First the plain member of each family: it tells what is worth beating.
    for bound, members in bounded:
        if bound >= _limit(best, top):
            break
        if reason := too_large(request, members[0]):
            # Every other order of the pipeline holds at least what 1F1B holds.
            refused.add(members[0])
            rejected.setdefault(_grid(members[0]), Rejected(members[0], reason))
            continue
        fitting.append((bound, members))
        best = _with(best, fastest_that_fits(request, members[0], _limit(best, top)), top)
    for bound, members in fitting:
        if bound >= _limit(best, top):
            break
        for layout in members[1:]:
            best = _with(best, fastest_that_fits(request, layout, _limit(best, top)), top)
    slower: dict[tuple[int, int, int], float] = {}
    for bound, members in bounded:
        grid = _grid(members[0])
        limit = slower.get(grid, float("inf"))
        if bound >= limit or members[0] in refused:
            continue
        found = fastest_that_fits(request, members[0], limit)
        if found is not None:
            slower[grid] = found.time.step_s
            rejected[grid] = Rejected(found.layout, f"fits, and takes {found.time.step_s:.2f} s a step in 1F1B order")
    answered = {_grid(candidate.layout) for candidate in best}
    reasons = [reject for grid, reject in sorted(rejected.items()) if grid not in answered]
    return Plan(tuple(best), tuple(reasons), sum(map(len, families.values())))


def _limit(best: Sequence[Candidate], top: int) -> float:
    """Seconds that a further answer must undercut."""
    return best[-1].time.step_s if len(best) >= top else float("inf")


def _with(best: list[Candidate], found: Candidate | None, top: int) -> list[Candidate]:
    if found is None:
        return best
    return sorted([*best, found], key=lambda candidate: candidate.time.step_s)[:top]


def _bound(request: Request, members: Sequence[Layout]) -> float:
    """Seconds that no member of a family can undercut."""
    plain = min((time_of(request, layout) for layout in members if layout.schedule == "1f1b"), key=lambda t: t.step_s)
    # Finer layer maps may balance the head a little better than 1F1B's own.
    return 0.97 * (plain.step_s - plain.breakdown.pipeline)


def _states_too_large(request: Request, layout: Layout) -> str | None:
    """Why not even weights, gradients and optimizer states fit, None if they may."""
    layers = max(layout.layers) * request.spec.layer_matmul_parameters / layout.tp
    weights, shared = {"optimizer": (6, 12), "gradients": (2, 16), "full": (0, 16)}.get(layout.shard, (18, 0))
    needed = layers * (weights + shared / layout.dp)
    if needed <= request.capacity_bytes:
        return None
    gib = 2**30
    return (
        f"weights, gradients and optimizer states alone need {needed / gib:.1f} GiB"
        f" of {request.capacity_bytes / gib:.1f}"
    )


def too_large(request: Request, layout: Layout) -> str | None:
    """By how much the layout does not fit even when whole layers are recomputed, None if it does."""
    memory = memory_of(request, replace(layout, recompute=RECOMPUTE[-1]))
    if oom_probability(request, memory) <= MAX_OOM_PROBABILITY:
        return None
    used = max(stage.used_bytes for stage in memory) / 2**30
    return f"needs {used:.1f} GiB of {request.capacity_bytes / 2**30:.1f} even when whole layers are recomputed"


def fastest_that_fits(request: Request, layout: Layout, limit_s: float) -> Candidate | None:
    """The layout with the recompute that makes it fit at the least cost; None if none does below `limit_s`."""
    if _problem(request, layout) is not None:
        return None
    best: Candidate | None = None
    for recompute in RECOMPUTE:
        candidate = replace(layout, recompute=recompute)
        # The price of time is cheaper to find than that of memory, so it is asked first.
        if time_of(request, candidate).step_s < (limit_s if best is None else best.time.step_s):
            priced = price(request, candidate)
            if priced.fits:
                best = priced
                if not recompute:
                    break
    return best


def layouts(request: Request) -> Iterator[Layout]:
    """Every layout of the cluster that the trainer can run, without recompute: the space that is searched."""
    spec, cluster = request.spec, request.cluster
    world = cluster.world_size
    for tp in divisors(world):
        if tp > cluster.gpus_per_node and not request.tp_across_nodes:
            continue
        if spec.num_attention_heads % tp or spec.intermediate_size % tp:
            continue
        for pp in divisors(world // tp):
            if pp > spec.num_hidden_layers:
                continue
            dp = world // tp // pp
            for micro_batch in _micro_batches(request.global_batch, dp, pp):
                for schedule, vpp in _schedules(spec.num_hidden_layers, pp):
                    for layers in _layer_maps(request, pp * vpp):
                        for shard in SHARDS if dp > 1 else SHARDS[:1]:
                            yield Layout(
                                tp=tp,
                                pp=pp,
                                vpp=vpp,
                                dp=dp,
                                micro_batch=micro_batch,
                                schedule=schedule,
                                shard=shard,
                                layers=layers,
                            )


def _micro_batches(global_batch: int, dp: int, pp: int) -> Sequence[int]:
    """Micro-batch sizes that divide a rank's share and leave enough micro-batches to fill the pipeline."""
    if global_batch % dp:
        return (1,)  # kept, so that its rule is told
    share = global_batch // dp
    sizes = [size for size in divisors(share) if size <= MAX_MICRO_BATCH and share // size >= pp]
    return sizes or (1,)


def _schedules(num_layers: int, pp: int) -> Iterator[tuple[Schedule, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    yield "1f1b", 1
    yield "zero-bubble", 1
    for vpp in range(2, MAX_VIRTUAL_STAGES + 1):
        if num_layers % (pp * vpp) == 0:
            yield "interleaved", vpp


def _layer_maps(request: Request, num_stages: int) -> list[tuple[int, ...]]:
    even = even_layers(request.spec.num_hidden_layers, num_stages)
    if num_stages == 1:
        return [even]
    balanced = balanced_layers(request.spec, num_stages, request.seq_len)
    return [even] if balanced == even else [even, balanced]


def _problem(request: Request, layout: Layout) -> str | None:
    """The first rule that the layout breaks."""
    problems = layout_problems(
        request.spec,
        layout,
        world_size=request.cluster.world_size,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        gpus_per_node=request.cluster.gpus_per_node,
        tp_across_nodes=request.tp_across_nodes,
    )
    return str(problems[0]) if problems else None


def _grid(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.pp, layout.dp

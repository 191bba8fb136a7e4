"""Finds the fastest layouts that fit: the whole legal space, best first, and no more of it than needs pricing.

A queue holds every layout, by a step time that it cannot undercut. The layout at its head is asked for its memory, and
if it fits goes back by its exact step time; the first ones that come up again are therefore the answers. What cannot
hold even its weights, gradients and optimizer states is never priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from triweave.errors import InputError, Problem, divisors, nearest_number
from triweave.layout import Layout, Recompute, Schedule, Shard, balanced_layers, even_layers
from triweave.planner.assumptions import GIB
from triweave.planner.request import (
    Candidate,
    Request,
    least_time_of,
    memory_if_fits,
    memory_of,
    oom_probability,
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
_PROGRESS_EVERY = 64

Grid = tuple[int, int, int]
"""Tensor, pipeline and data parallel ranks."""


class _Entry(NamedTuple):
    """A layout in the queue. Ties go to the layout that comes first in `layouts`, and to less recomputation."""

    seconds: float
    """The step, or what it cannot undercut as long as `found` is None."""
    number: int
    """Of the layout without its recomputation, which is in `RECOMPUTE` at `recompute`."""
    recompute: int
    layout: Layout
    found: Candidate | None


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

    Raises:
        InputError: no layout of the cluster is legal for the model and the batch, or `top` is not positive.
    """
    if top < 1:
        raise InputError(Problem("--top", top, "must be at least 1", "1"))
    every = list(layouts(request))
    rejected: dict[Grid, Rejected] = {}
    queue: list[_Entry] = []
    legal = 0
    for number, layout in enumerate(every):
        problem = _problem(request, layout)
        legal += problem is None
        if reason := problem or _states_too_large(request, layout):
            rejected.setdefault(_grid(layout), Rejected(layout, reason))
        else:
            queue.append(_Entry(least_time_of(request, layout), number, 0, layout, None))
        if progress is not None and number % _PROGRESS_EVERY == 0:
            progress(number, len(every))
    if progress is not None:
        progress(len(every) - 1, len(every))
    if not legal:
        raise InputError(_no_legal_layout(request, every))
    answers, others = _walk(request, queue, top)
    rejected |= others
    answered = {_grid(candidate.layout) for candidate in answers}
    reasons = [reject for grid, reject in sorted(rejected.items()) if grid not in answered]
    return Plan(tuple(answers), tuple(reasons), len(every))


def _walk(request: Request, queue: list[_Entry], top: int) -> tuple[list[Candidate], dict[Grid, Rejected]]:
    """The fastest layouts that fit, and what becomes of the grids that are not among them."""
    answers: list[Candidate] = []
    answered: set[int] = set()
    others: dict[Grid, Rejected] = {}
    too_large: dict[Grid, list[Layout]] = {}
    heapify(queue)
    while queue:
        entry = heappop(queue)
        layout, grid = entry.layout, _grid(entry.layout)
        wanted = len(answers) < top
        plain = layout.schedule == "1f1b" and grid not in others
        if entry.number in answered or not (wanted or plain):
            continue
        if entry.found is None:
            memory = memory_if_fits(request, layout)
            if memory is not None:
                found = Candidate(layout, memory, time_of(request, layout), True, oom_probability(request, memory))
                heappush(queue, entry._replace(seconds=found.time.step_s, found=found))
            else:
                too_large.setdefault(grid, []).append(layout)
            if memory is None and entry.recompute == 0:
                # No way to recompute makes the step shorter, so the others wait until this one is refused.
                for which in range(1, len(RECOMPUTE)):
                    sparing = replace(layout, recompute=RECOMPUTE[which])
                    heappush(queue, _Entry(least_time_of(request, sparing), entry.number, which, sparing, None))
            continue
        answered.add(entry.number)
        if wanted:
            answers.append(entry.found)
        if plain:
            reason = f"fits, and takes {entry.seconds:.2f} s a step in 1F1B order"
            others[grid] = Rejected(layout, reason)
    for grid, refused in too_large.items():
        if grid not in others:
            others[grid] = _least_memory(request, refused)
    return answers, others


def _least_memory(request: Request, refused: Sequence[Layout]) -> Rejected:
    """Of layouts that do not fit, the one that is nearest to it."""
    sparing = [layout for layout in refused if layout.recompute == RECOMPUTE[-1]] or refused
    used, layout = min(
        ((max(stage.used_bytes for stage in memory_of(request, layout)), layout) for layout in sparing),
        key=itemgetter(0),
    )
    return Rejected(layout, f"needs at least {used / GIB:.1f} GiB of {request.capacity_bytes / GIB:.1f}")


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
            orders = list(_orders(request, pp))
            for micro_batch in _micro_batches(request.global_batch, dp, pp):
                for schedule, vpp, layers in orders:
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


def _orders(request: Request, pp: int) -> Iterator[tuple[Schedule, int, tuple[int, ...]]]:
    """Schedules of a pipeline, their virtual stages a rank, and their layer maps."""
    num_layers = request.spec.num_hidden_layers
    schedules: list[tuple[Schedule, int]] = [("1f1b", 1)]
    if pp > 1:
        schedules.append(("zero-bubble", 1))
        schedules += [("interleaved", vpp) for vpp in range(2, MAX_VIRTUAL_STAGES + 1) if num_layers % (pp * vpp) == 0]
    for schedule, vpp in schedules:
        for layers in _layer_maps(request, pp * vpp):
            yield schedule, vpp, layers


def _layer_maps(request: Request, num_stages: int) -> list[tuple[int, ...]]:
    even = even_layers(request.spec.num_hidden_layers, num_stages)
    if num_stages == 1:
        return [even]
    balanced = balanced_layers(request.spec, num_stages, request.seq_len)
    return [even] if balanced == even else [even, balanced]


def _states_too_large(request: Request, layout: Layout) -> str | None:
    """Why not even weights, gradients and optimizer states fit, None if they may."""
    layers = max(layout.layers) * request.spec.layer_matmul_parameters / layout.tp
    weights, shared = {"optimizer": (6, 12), "gradients": (2, 16), "full": (0, 16)}.get(layout.shard, (18, 0))
    needed = layers * (weights + shared / layout.dp)
    if needed <= request.capacity_bytes:
        return None
    return (
        f"weights, gradients and optimizer states alone need {needed / GIB:.1f} GiB"
        f" of {request.capacity_bytes / GIB:.1f}"
    )


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


def _no_legal_layout(request: Request, every: Sequence[Layout]) -> Problem:
    """What to change where every layout breaks a rule."""
    world, batch = request.cluster.world_size, request.global_batch
    legal: set[int] = set()
    for layout in every:
        # Every data-parallel rank needs as many micro-batches as there are pipeline ranks.
        least = layout.dp * layout.pp
        nearest = max(least, batch - batch % layout.dp)
        for other in (nearest, nearest + layout.dp):
            if _problem(replace(request, global_batch=other), replace(layout, micro_batch=1)) is None:
                legal.add(other)
    if legal:
        rule = f"no layout of {world} GPUs divides it: dp must, with a micro-batch at least for each pipeline rank"
        return Problem("--global-batch", batch, rule, nearest_number(batch, legal))
    first = _problem(request, every[0]) if every else "tp must divide the heads and the GPUs"
    return Problem("--cluster", request.cluster, f"no layout of {world} GPUs is legal: {first}")


def _grid(layout: Layout) -> Grid:
    return layout.tp, layout.pp, layout.dp

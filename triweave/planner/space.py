"""The space that is searched: every layout of a cluster that the rules allow, as grids, orders and ways to shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from triweave.errors import divisors
from triweave.layout import Layout, Recompute, Schedule, Shard, balanced_layers, even_layers
from triweave.planner.request import Request

RECOMPUTE: tuple[tuple[Recompute, ...], ...] = (
    (),
    ("norm", "swiglu"),
    ("norm", "swiglu", "attention"),
    ("mlp",),
    ("norm", "mlp"),
    ("layer",),
)
"""From the cheapest to the most sparing."""

REPEATS_MORE: dict[tuple[Recompute, ...], tuple[tuple[Recompute, ...], ...]] = {
    (): (("norm", "swiglu"),),
    # The MLP's products take longer than the one norm that is not its own.
    ("norm", "swiglu"): (("norm", "swiglu", "attention"), ("mlp",)),
    ("norm", "swiglu", "attention"): (),
    ("mlp",): (("norm", "mlp"),),
    ("norm", "mlp"): (("layer",),),
    ("layer",): (),
}
"""The next choices that repeat more, so that no step of theirs is shorter; each is reached once."""

SHARDS: tuple[Shard, ...] = ("optimizer", "gradients", "full")
"""`none` is `optimizer` with more memory and the same traffic, so it is never better."""

MAX_MICRO_BATCH = 8
MAX_VIRTUAL_STAGES = 8


class Grid(NamedTuple):
    """Ranks along each axis."""

    tp: int
    pp: int
    cp: int
    dp: int


class Order(NamedTuple):
    """A schedule of a pipeline and its layer map."""

    schedule: Schedule
    vpp: int
    layers: tuple[int, ...]


def grid_of(layout: Layout) -> Grid:
    """The grid of a layout."""
    return Grid(layout.tp, layout.pp, layout.cp, layout.dp)


def layouts(request: Request) -> Iterator[Layout]:
    """Every layout of the space, without recompute."""
    for root in grids(request):
        for order in orders(request, root.pp):
            for shard, group in sharings(root.replicas):
                yield replace(root, **order._asdict(), shard=shard, shard_group=group)


def grids(request: Request) -> Iterator[Layout]:
    """Every grid with every micro-batch, its schedule 1F1B and its layers spread evenly.

    Where no micro-batch is legal one is given all the same, so that the rule it breaks can be told.
    """
    spec, cluster = request.spec, request.cluster
    world, num_layers = cluster.world_size, spec.num_hidden_layers
    for tp in divisors(world):
        if tp > cluster.gpus_per_node and not request.tp_across_nodes:
            continue
        if spec.num_attention_heads % tp or spec.intermediate_size % tp:
            continue
        for pp in divisors(world // tp):
            if pp > num_layers:
                continue
            layers = even_layers(num_layers, pp)
            for cp in divisors(world // tp // pp):
                # Two slices of a sequence for each context-parallel rank, which tp ranks split further.
                if cp > 1 and (request.seq_len % (2 * cp) or request.seq_len % (cp * tp)):
                    continue
                dp = world // tp // pp // cp
                for micro_batch in _micro_batches(request.global_batch, dp, pp):
                    yield Layout(tp=tp, pp=pp, cp=cp, dp=dp, micro_batch=micro_batch, layers=layers)


def orders(request: Request, pp: int) -> Iterator[Order]:
    """Schedules of a pipeline, their virtual stages a rank, and their layer maps."""
    num_layers = request.spec.num_hidden_layers
    schedules: list[tuple[Schedule, int]] = [("1f1b", 1)]
    if pp > 1:
        schedules.append(("zero-bubble", 1))
        schedules += [("interleaved", vpp) for vpp in range(2, MAX_VIRTUAL_STAGES + 1) if num_layers % (pp * vpp) == 0]
    for schedule, vpp in schedules:
        for layers in _layer_maps(request, pp * vpp):
            yield Order(schedule, vpp, layers)


def sharings(replicas: int) -> Iterator[tuple[Shard, int | None]]:
    """Levels of `shard` and their groups: all ranks that hold the same weights, or any number that divides them."""
    if replicas == 1:
        yield SHARDS[0], None
        return
    for shard in SHARDS:
        yield shard, None
        for group in reversed(divisors(replicas)[1:-1]):
            yield shard, group


def _micro_batches(global_batch: int, dp: int, pp: int) -> Sequence[int]:
    """Micro-batch sizes that divide a rank's share and leave enough micro-batches to fill the pipeline."""
    if global_batch % dp:
        return (1,)
    share = global_batch // dp
    sizes = [size for size in divisors(share) if size <= MAX_MICRO_BATCH and share // size >= pp]
    return sizes or (1,)


def _layer_maps(request: Request, num_stages: int) -> list[tuple[int, ...]]:
    even = even_layers(request.spec.num_hidden_layers, num_stages)
    if num_stages == 1:
        return [even]
    balanced = balanced_layers(request.spec, num_stages, request.seq_len)
    return [even] if balanced == even else [even, balanced]

"""What the host needs to issue the actions of a step: launches, autograd, hooks, its part of communication.

A probe measures our trainer's layer as training issues it, for each axis and for what is recomputed. Whether a step
waits for its host is `time_pipeline`'s to say: the host runs ahead of the GPU, so that one slow action is hidden by the
work before it. Of other stacks it is one of their constants, and each half of a layer waits for it (`time_layer`): so
read, vTrain's rows on four and eight GPUs are off by 8 %, and by 13 % if the host of that stack could run ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import sub

from triweave.layout import Layout, Recompute, Shard
from triweave.planner.machine import HostKey
from triweave.planner.time_parts import Place
from triweave.planner.time_pipeline import StageCost

_HEAD_LAUNCHES = 24
"""Kernels of norm, head and loss, forward; about as many backward."""
_REPEATED: dict[Recompute, float] = {"norm": 0.1, "swiglu": 0.1, "attention": 0.4, "mlp": 0.4, "layer": 1.0}
"""Share of a layer's launches forward that are issued again, where it was not measured."""


@dataclass(frozen=True, slots=True)
class _Graphs:
    """Seconds of the host that issued them for a layer's pass as a CUDA graph: a launch, and two nodes of autograd."""

    forward: float
    backward: float


_GRAPHS = {"bf16": _Graphs(0.78e-3 / 20, 1.53e-3 / 20), "fp8": _Graphs(1.14e-3 / 20, 2.10e-3 / 20)}
"""20 layers of a TP 8 rank whose tensors are tiny, on an H200's host (`python bench/graphs.py --only host`); the GPU
may have been the slower of the two there, so that a host needs no more."""
_GRAPHS_LAUNCH_S = 7.4e-6
"""One kernel on such a host, by the profile of one H200; others are as much slower or faster at a graph."""


def stage_hosts(place: Place, layout: Layout) -> tuple[StageCost, ...]:
    """Seconds of the host for one micro-batch on each virtual stage, where it runs ahead."""
    if not place.stack.own:
        return ()
    shard = layout.shard if layout.replicas > 1 else None
    if layout.cuda_graphs and place.tp.nodes == 1:
        layer = graphs_host(place, shard, split=layout.schedule == "zero-bubble")
    else:
        layer = layer_host(place, shard)
    launch_s = place.trainer.launch_s or 0.0 if place.trainer is not None else 0.0
    found = []
    for stage, count in enumerate(layout.layers):
        ends = _HEAD_LAUNCHES * launch_s if stage == layout.num_stages - 1 else 0.0
        halves = count * layer.forward + ends, count * layer.backward_input + ends, count * layer.backward_weight
        found.append(StageCost(*halves))
    return tuple(found)


@lru_cache(maxsize=4096)
def layer_host(place: Place, shard: Shard | None) -> StageCost:
    """Of one layer for one micro-batch; what runs again is in the input half of backward.

    What hooks and reductions of data-parallel ranks add was measured without tensor parallelism, and is added to it; so
    is what casts to fp8 add, measured with nothing recomputed.
    """
    known = place.trainer.hosts if place.trainer is not None else {}
    # Without sequence parallelism there are no copies and flags: a layer of one rank and four all-reduces.
    ranks = place.tp.ranks if place.sequence_parallel else 1
    reductions = 2 * place.stack.host.collective if place.tp.ranks > ranks else 0.0
    if known and ranks not in {key[0] for key in known}:
        # Flags and copies of a group that was not measured are at least those of the largest that was.
        ranks = max(key[0] for key in known)
    again = min(1.0, sum(_REPEATED[name] for name in place.recompute))
    seconds = known.get((ranks, None, place.recompute, "bf16"))
    if seconds is None:
        host = host_of_stack(place)
        return replace(host, backward_input=host.backward_input + again * host.forward)
    gathers = _context_collectives(place) * place.stack.host.collective
    layer = StageCost(seconds[0] + reductions + gathers, seconds[1] + reductions + 2 * gathers, seconds[2])
    if place.precision == "fp8":
        casts = _more(known, (ranks, None, (), "fp8"), (ranks, None, (), "bf16"))
        layer = _sum(layer, replace(casts, backward_input=casts.backward_input + again * casts.forward))
    return _sum(layer, _more(known, (1, shard, (), "bf16"), (1, None, (), "bf16")))


@lru_cache(maxsize=4096)
def graphs_host(place: Place, shard: Shard | None, *, split: bool) -> StageCost:
    """Of one layer whose passes are CUDA graphs; hooks and reductions run beside them as they do without.

    Args:
        place: where it runs.
        shard: how replicas share its states; None where there are none.
        split: whether the schedule has a weight half, which is one launch more.
    """
    known = place.trainer.hosts if place.trainer is not None else {}
    measured = place.trainer.launch_s if place.trainer is not None else None
    launch_s = measured or _GRAPHS_LAUNCH_S
    one = _GRAPHS["fp8" if place.precision == "fp8" else "bf16"]
    slower = launch_s / _GRAPHS_LAUNCH_S
    layer = StageCost(one.forward * slower, one.backward * slower, launch_s if split else 0.0)
    return _sum(layer, _more(known, (1, shard, (), "bf16"), (1, None, (), "bf16")))


def _more(known: Mapping[HostKey, tuple[float, float, float]], what: HostKey, plain: HostKey) -> StageCost:
    """What one kind of layer takes more than another; nothing where it was not measured."""
    if what not in known or plain not in known:
        return StageCost(0.0, 0.0, 0.0)
    return StageCost(*map(sub, known[what], known[plain]))


def _sum(one: StageCost, other: StageCost) -> StageCost:
    forward, backward_input, backward_weight = (
        max(0.0, getattr(one, half) + getattr(other, half)) for half in ("forward", "backward_input", "backward_weight")
    )
    return StageCost(forward, backward_input, backward_weight)


def host_of_stack(place: Place) -> StageCost:
    """Of one layer for one micro-batch, by the constants of the software; nothing is run again."""
    host = place.stack.host
    messages = _context_collectives(place) if place.stack.own else place.cp.ranks - 1
    collectives = ((2 if place.tp.ranks > 1 else 0) + messages) * host.collective
    return StageCost(host.forward + collectives, 2 / 3 * host.backward + collectives, host.backward / 3)


def _context_collectives(place: Place) -> int:
    """Gathers of keys that our trainer starts in a forward; a backward has them too, and as many reduce-scatters."""
    return 2 if place.cp.ranks > 1 else 0

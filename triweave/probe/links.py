"""Collectives and messages between the GPUs of a node, and copies to the host: curves by size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from triweave.collectives import all_reduce, gather_into, reduce_scatter_into
from triweave.groups import Group
from triweave.planner.profile import Collective, CollectiveCurve, LinkCurve, Point
from triweave.probe.session import Session

MIB = 2**20


def sizes(small: bool) -> tuple[int, ...]:
    """Bytes of the whole tensor, multiples of what eight ranks cut it into."""
    if small:
        return (2**12, 2**16)
    return (2**14, 2**18, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)


def measure_collectives(session: Session) -> tuple[CollectiveCurve, ...]:
    """All-gather, reduce-scatter and all-reduce over the first 2, 4, ... ranks."""
    curves = []
    for group in session.in_order():
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            points = tuple(_collective(session, kind, group, size) for size in sizes(session.small))
            curves.append(CollectiveCurve(kind, group.size, "node", points))
            session.tell("collectives", 0.0)
    return tuple(curves)


def _collective(session: Session, kind: Collective, group: Group, size: int) -> Point:
    # Gradients are summed in float32, slices gathered in 16 bits: what counts is the bytes.
    whole = session.random(size // 4, dtype=torch.float32)
    mine = whole.chunk(group.size)[group.rank].clone()
    calls: dict[Collective, Callable[[], object]] = {
        "all_gather": partial(gather_into, whole, mine, group),
        "reduce_scatter": partial(reduce_scatter_into, mine, whole, group),
        "all_reduce": partial(all_reduce, whole, group),
    }
    return size, round(session.seconds(calls[kind], group), 9)


def measure_messages(session: Session) -> tuple[LinkCurve, ...]:
    """From the first rank to the second, as pipeline stages send."""
    group = session.groups.get(2)
    if group is None:
        return ()
    points = []
    for size in sizes(session.small):
        message = session.random(size // 2)

        def pass_on(message: torch.Tensor = message) -> None:
            to, function = (1, dist.isend) if group.rank == 0 else (0, dist.irecv)
            work = function(message, group.ranks[to], group=group.handle)
            if work is not None:
                work.wait()

        points.append((size, round(session.seconds(pass_on, group), 9)))
    return (LinkCurve("node", tuple(points)),)


def measure_host_copies(session: Session) -> tuple[Point, ...]:
    """The slower of both directions, from and to pinned memory."""
    points = []
    for size in sizes(session.small):
        here = torch.empty(size, dtype=torch.uint8, pin_memory=session.on_gpu)
        there = torch.empty(size, dtype=torch.uint8, device=session.device)
        both = (partial(there.copy_, here, non_blocking=True), partial(here.copy_, there, non_blocking=True))
        points.append((size, round(max(session.seconds(one, repeats=6) for one in both), 9)))
    return tuple(points)

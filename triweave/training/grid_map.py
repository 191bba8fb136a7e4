"""Which rank is where and does what, as the ranks themselves say: the plan's numbers and the hosts' names together."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from torch._C._distributed_c10d import Store

from triweave.layout import Layout
from triweave.recovery.agreement import exchange
from triweave.training.process import Process

MOST_HOSTS = 12
"""That have a line each; of more the first and the last ones."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs."""

    rank: int
    host: str
    device: str
    """`cuda:3`, `cpu`."""
    model: str
    """As its driver calls the GPU; empty for a CPU."""


def gather_places(store: Store | None, process: Process, device: torch.device, timeout_s: float) -> tuple[Place, ...]:
    """The places of all ranks on rank 0, on the others their own; all ranks call it together.

    Raises:
        RunFailed: on rank 0, a rank has not come.
    """
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    mine = Place(process.rank, socket.gethostname(), str(device), model)
    if store is None:
        return (mine,)
    told = exchange(store, "places", process.rank, process.world_size, json.dumps(asdict(mine)), timeout_s)
    return tuple(Place(**json.loads(text)) for text in told) or (mine,)


def grid_map(layout: Layout, places: Sequence[Place]) -> list[str]:
    """A line a host, and a warning for what tensor parallelism cannot like. Needs the places of all ranks."""
    hosts: dict[str, list[Place]] = {}
    for place in places:
        hosts.setdefault(place.host, []).append(place)
    lines = [f"host      {name}: {_does(layout, its)}" for name, its in hosts.items()]
    if len(lines) > MOST_HOSTS:
        half = MOST_HOSTS // 2
        lines = [*lines[:half], f"          ... {len(lines) - MOST_HOSTS} hosts more", *lines[-half:]]
    return [*lines, *_warnings(layout, places)]


def _does(layout: Layout, places: Sequence[Place]) -> str:
    at = [layout.coordinates(place.rank) for place in places]
    axes = [("stage", [one.pp for one in at], layout.pp), ("tp", [one.tp for one in at], layout.tp)]
    axes.append(("dp", [one.dp for one in at], layout.dp))
    roles = ", ".join(f"{name} {_span(numbers)}" for name, numbers, size in axes if size > 1)
    devices = sorted({int(place.device.partition(":")[2] or 0) for place in places})
    kind = places[0].device.partition(":")[0]
    on = f"{kind}:{_span(devices)}" if kind == "cuda" else kind
    model = f" ({places[0].model})" if places[0].model else ""
    ranks = f"rank{'s' * (len(places) > 1)} {_span([place.rank for place in places])}"
    return f"{ranks} on {on}{model}" + (f": {roles}" if roles else "")


def _warnings(layout: Layout, places: Sequence[Place]) -> Iterator[str]:
    host_of = {place.rank: place.host for place in places}
    crossing = [group for group in layout.groups("tp") if len({host_of[rank] for rank in group}) > 1]
    if crossing:
        hosts = ", ".join(dict.fromkeys(host_of[rank] for rank in crossing[0]))
        yield (
            f"warning   {len(crossing)} of {len(layout.groups('tp'))} tensor-parallel groups cross hosts, the first on"
            f" {hosts}: every layer waits for the network. Ranks must be numbered host by host (triweave doctor)"
        )


def _span(numbers: Sequence[int]) -> str:
    """`0-7` where they have no gap, otherwise each."""
    ordered = sorted(set(numbers))
    if len(ordered) > 2 and all(after == before + 1 for before, after in pairwise(ordered)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))

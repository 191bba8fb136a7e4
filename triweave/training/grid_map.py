"""Which rank is where and does what, as the ranks themselves say: the plan's numbers and the hosts' names together."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch._C._distributed_c10d import Store

from triweave.launch.placement import describe_node
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
    """A line a host, and warnings of groups that cross hosts and should not. Needs the places of all ranks."""
    hosts: dict[str, list[Place]] = {}
    for place in places:
        hosts.setdefault(place.host, []).append(place)
    lines = [f"host      {name}: {_does(layout, its)}" for name, its in hosts.items()]
    if len(lines) > MOST_HOSTS:
        half = MOST_HOSTS // 2
        lines = [*lines[:half], f"          ... {len(lines) - MOST_HOSTS} hosts more", *lines[-half:]]
    return [*lines, *_warnings(layout, places)]


def _does(layout: Layout, places: Sequence[Place]) -> str:
    models = ", ".join(dict.fromkeys(place.model for place in places if place.model))
    devices = f"{places[0].device} to {places[-1].device}" if len(places) > 1 and models else places[0].device
    return f"{describe_node(layout, [place.rank for place in places])}; {devices}{f', {models}' if models else ''}"


def _warnings(layout: Layout, places: Sequence[Place]) -> Iterator[str]:
    host_of = {place.rank: place.host for place in places}
    crossing = [group for group in layout.groups("tp") if len({host_of[rank] for rank in group}) > 1]
    if crossing:
        hosts = ", ".join(dict.fromkeys(host_of[rank] for rank in crossing[0]))
        yield (
            f"warning   {len(crossing)} of {len(layout.groups('tp'))} tensor-parallel groups cross hosts, the first on"
            f" {hosts}: every layer waits for the network"
        )
    most = max(Counter(place.host for place in places).values())
    shards = layout.shard_groups() if layout.uses_shard_groups and layout.tp * layout.shard_ranks <= most else []
    if crossing := [group for group in shards if len({host_of[rank] for rank in group}) > 1]:
        hosts = ", ".join(dict.fromkeys(host_of[rank] for rank in crossing[0]))
        yield (
            f"warning   {len(crossing)} of {len(shards)} shard groups cross hosts, the first on {hosts}, and one host"
            f" has room for {layout.tp} x {layout.shard_ranks} ranks: what is gathered in them waits for the network"
        )

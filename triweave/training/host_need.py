"""What a run takes of its hosts' memory, held against what they have: offload, and copies of states that are saved.

Nothing tells of memory that runs out on a host: the kernel ends a process, and its launcher the rest.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from triweave.cluster import GIB
from triweave.config.validate import ResolvedRun
from triweave.errors import InputError, Problem
from triweave.host_room import HostRoom
from triweave.layout import Layout, Offload
from triweave.planner.forecast import stages_of
from triweave.training.process import Process

ROOM = 0.8
"""Part of a host's available memory that copies may take: data, and pages of files on their way, want some too."""


@dataclass(frozen=True, slots=True)
class Host:
    """What all ranks of a host take together. Bytes."""

    name: str
    num_ranks: int
    copies_bytes: int
    """Copies of their states, to be saved from."""
    offload_bytes: int
    """What their layers keep there at most, as predicted."""
    available_bytes: int

    @property
    def has_room_for_copies(self) -> bool:
        """Whether they can be made, beside what is offloaded later."""
        return self.copies_bytes + self.offload_bytes <= ROOM * self.available_bytes


def hosts_of(said: Sequence[tuple[str, int, int, int]]) -> list[Host]:
    """Add up what every rank says: its host (the name first), and bytes of its copies, of its offload, and free."""
    hosts = []
    for key in dict.fromkeys(key for key, *_ in said):
        copies, offload, free = zip(*(sizes for at, *sizes in said if at == key), strict=True)
        hosts.append(Host(key.partition(" ")[0], len(copies), sum(copies), sum(offload), min(free)))
    return hosts


def no_room_for_copies(hosts: Sequence[Host]) -> str | None:
    """Why no copies are made, of the host that has the least room; None if all have enough."""
    short = [host for host in hosts if not host.has_room_for_copies]
    if not short:
        return None
    host = min(short, key=lambda host: ROOM * host.available_bytes - host.copies_bytes - host.offload_bytes)
    offload = f", offload {host.offload_bytes / GIB:.2f}" if host.offload_bytes else ""
    return (
        f"copies would take {host.copies_bytes / GIB:.2f} GiB on {host.name}{offload}, and of its free"
        f" {host.available_bytes / GIB:.2f} GiB {ROOM:.0%} may be taken"
    )


def warnings(hosts: Sequence[Host]) -> list[str]:
    """A line for each host on which what is offloaded will hardly find room. It may: others there may end before."""
    return [
        f"warning   layout.offload keeps up to {host.offload_bytes / GIB:.2f} GiB in the memory of {host.name}"
        f" ({host.num_ranks} ranks), where {host.available_bytes / GIB:.2f} GiB are free: the kernel may end a rank"
        for host in hosts
        if host.offload_bytes > host.available_bytes
    ]


def offload_bytes(resolved: ResolvedRun, pp_rank: int) -> int:
    """Host memory that the layers of a rank take at most, as predicted."""
    return stages_of(resolved)[pp_rank].host_bytes if resolved.layout.offload else 0


def check_offload(resolved: ResolvedRun, process: Process, room: HostRoom) -> None:
    """Refuse to begin what this host can never hold.

    Args:
        resolved: the run.
        process: a rank of this host; its ranks are numbered one after the other.
        room: of this host.

    Raises:
        InputError: its ranks offload more than the memory that it has; the message names what fits.
    """
    layout = resolved.layout
    first = process.rank - process.local_rank
    ranks = range(first, min(first + process.local_world_size, layout.world_size))
    needed = _needed(resolved, layout, ranks)
    if needed <= room.total_bytes:
        return
    fitting = [
        (bytes_, kinds)
        for kinds in _less(layout.offload)
        if (bytes_ := _needed(resolved, replace(layout, offload=kinds), ranks)) <= room.total_bytes
    ]
    rule = (
        f"keeps {needed / GIB:.2f} GiB in the memory of {socket.gethostname()} for its {len(ranks)} ranks, and it (or"
        f" the control group of this process) has {room.total_bytes / GIB:.2f} GiB"
    )
    raise InputError(Problem("layout.offload", _spell(layout.offload), rule, _spell(max(fitting)[1])))


def _less(kinds: tuple[Offload, ...]) -> list[tuple[Offload, ...]]:
    """Nothing, and each of several kinds alone."""
    return [(), *((kind,) for kind in kinds if len(kinds) > 1)]


def _needed(resolved: ResolvedRun, layout: Layout, ranks: Sequence[int]) -> int:
    by_stage = [stage.host_bytes for stage in stages_of(replace(resolved, layout=layout))]
    return sum(by_stage[layout.coordinates(rank).pp] for rank in ranks)


def _spell(kinds: tuple[Offload, ...]) -> str:
    return f"[{', '.join(kinds)}]"

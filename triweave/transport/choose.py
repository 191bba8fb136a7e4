"""Which transports a run gets: the copy engines wherever they reach, collectives elsewhere."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from triweave.groups import Group
from triweave.sharing import MOST_RANKS, shared_bytes
from triweave.transport.buffers import Memory, PlainMemory
from triweave.transport.copy_engine import copy_engines
from triweave.transport.interface import Transport
from triweave.transport.plain import Collectives
from triweave.transport.shared_memory import SharedMemory, allocate, share

Wanted = Literal["auto", "off"]
ChooseTransport = Callable[[Wanted, Group, bool, torch.device, int], Transport]
"""The form of `choose_transport`."""


def choose_transport(
    wanted: Wanted, group: Group, sequence_parallel: bool, device: torch.device, slice_bytes: int
) -> Transport:
    """The transport for `runtime.overlap_tp`. All ranks of the group call it together and get the same kind.

    Args:
        wanted: `off`, or `auto` for the best that this machine has.
        group: the tensor-parallel group.
        sequence_parallel: whether activations between products are sliced along the sequence.
        device: this rank's.
        slice_bytes: an activation `[seq/tp, micro_batch, hidden]`.
    """
    if group.size == 1 or not sequence_parallel:
        return Collectives(group, sequence_parallel)
    if wanted == "off":
        return Collectives(group, sequence_parallel, "runtime.overlap_tp is off")
    if device.type != "cuda":
        return Collectives(group, sequence_parallel, f"no copy engines on {device.type}")
    if not _peers_are_reached(group, device):
        return Collectives(group, sequence_parallel, "GPUs do not reach each other's memory")
    found: Transport | None = None
    why = "another rank could not"
    try:
        found = copy_engines(group, device, slice_bytes)
    except (RuntimeError, OSError) as error:
        why = str(error).partition("\n")[0]
    if _all(found is not None, group, device) and found is not None:
        return found
    return Collectives(group, sequence_parallel, f"no symmetric memory: {why}")


def choose_memory(
    wanted: Literal["auto", "off"], group: Group, device: torch.device, sizes: Sequence[int], part: int
) -> Memory:
    """Where the data-parallel axis keeps its buffers, for `runtime.overlap_dp`. All ranks of the group call it.

    Args:
        wanted: `off`, or `auto` for the best that this machine has.
        group: the data-parallel group.
        device: this rank's.
        sizes: bytes of the buffers that peers are to read.
        part: elements of one peer's part of a piece of gradient sums.
    """
    if group.size == 1:
        return PlainMemory(group, device)
    if wanted == "off":
        return PlainMemory(group, device, "runtime.overlap_dp is off")
    if device.type != "cuda":
        return PlainMemory(group, device, f"no copy engines on {device.type}")
    if not sizes:
        return PlainMemory(group, device, "layout.shard is full: buffers come and go")
    if group.size > MOST_RANKS or not _peers_are_reached(group, device):
        return PlainMemory(group, device, "GPUs do not reach each other's memory")
    mine: torch.Tensor | None = None
    found: SharedMemory | None = None
    why = "another rank could not"
    try:
        mine = allocate(shared_bytes(sizes), device)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    # Whoever has none must not leave the others waiting for it.
    if _all(mine is not None, group, device) and mine is not None:
        try:
            found = share(mine, group, part)
        except (RuntimeError, OSError) as error:
            why = str(error).partition("\n")[0]
        if _all(found is not None, group, device) and found is not None:
            return found
    return PlainMemory(group, device, f"no symmetric memory: {why}")


def _peers_are_reached(group: Group, device: torch.device) -> bool:
    """Whether all ranks are on one host, see each other's GPUs and can address their memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = zlib.crc32((socket.gethostname() + (boot.read_text() if boot.exists() else "")).encode())
    mine = torch.tensor([host, device.index], device=device)
    all_of_them = mine.new_empty(group.size, 2)
    dist.all_gather(list(all_of_them), mine, group=group.handle)
    places = [tuple(place) for place in all_of_them.tolist()]
    one_host = len({host for host, _ in places}) == 1 and len(set(places)) == group.size
    reached = one_host and all(
        index == device.index
        or (index < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device, index))
        for _, index in places
    )
    return _all(reached, group, device)


def _all(mine: bool, group: Group, device: torch.device) -> bool:
    verdict = torch.tensor(int(mine), device=device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN, group=group.handle)
    return bool(verdict)

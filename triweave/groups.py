"""The process groups of one rank: one frozen value made from a `Layout`, passed to whoever communicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from triweave.layout import Axis, Coordinates, Layout
from triweave.model_spec import ModelSpec
from triweave.parameters import has_tied_copy, kv_replicas
from triweave.schedule.dataflow import Channel


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate, and this rank's place among them. A group of one needs no handle."""

    ranks: tuple[int, ...]
    rank: int
    """Position of this process in `ranks`."""
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def alone(rank: int = 0) -> Group:
    """The group of one rank."""
    return Group((rank,), 0)


@dataclass(frozen=True, slots=True)
class Groups:
    """Everything one rank knows of the grid."""

    layout: Layout
    rank: int
    device: torch.device
    world: Group
    tp: Group
    cp: Group
    """Ranks that hold the other slices of the same sequences."""
    shards: Group
    """Ranks among which `shard` splits: this rank's shard group, or all of dp x cp, which hold the same weights."""
    across: Group
    """Ranks that own the same part in the other shard groups; a group of one where there is one shard group."""
    kv: Group
    """Tensor-parallel ranks that hold the same key/value heads."""
    tied: Group
    """First and last pipeline rank, when each holds a copy of the tied embedding; otherwise a group of one."""
    channels: Mapping[Channel, Group] = field(default_factory=dict)
    """Groups of two ranks, source first; one a direction and kind, so that no transfer waits behind another."""

    @property
    def at(self) -> Coordinates:
        """Where this rank sits."""
        return self.layout.coordinates(self.rank)

    def peer(self, pp_rank: int) -> int:
        """World rank of the same place on pipeline rank `pp_rank`."""
        at = self.at
        return self.layout.rank(Coordinates(at.tp, at.cp, at.dp, pp_rank))


def single_process(device: torch.device) -> Groups:
    """The grid of one rank; needs no `torch.distributed`."""
    one = alone()
    return Groups(Layout(), 0, device, one, one, one, one, one, one, one)


def make_groups(
    layout: Layout, spec: ModelSpec, channels: Iterable[Channel], device: torch.device, timeout_s: float = 600.0
) -> Groups:
    """Make every process group of the grid. All ranks call it with the same arguments.

    A rank gives up waiting for the others after `timeout_s`: groups do not take the default group's limit over.

    Point-to-point groups are made and used once here, in one global order: made on first use, two ranks can wait
    for each other's other channel for ever (Megatron-LM issue 5240).
    """
    if layout.world_size == 1:
        return single_process(device)
    rank = dist.get_rank()
    world = Group(tuple(range(layout.world_size)), rank, dist.group.WORLD)
    axes: tuple[Axis, Axis] = ("tp", "cp")
    tp, cp = (_make(axis, layout.groups(axis), rank, timeout_s) for axis in axes)
    # A communicator of its own also where it has the ranks of cp: a layer's keys must not wait behind a whole unit.
    sharing = layout.shard_groups() if layout.uses_shard_groups else layout.same_weights_groups()
    shards, across = _make("shards", sharing, rank, timeout_s), alone(rank)
    if layout.uses_shard_groups:
        across = _make("across", layout.replica_groups(), rank, timeout_s)
    pipelines = layout.groups("pp")
    tied = alone(rank)
    if has_tied_copy(spec, layout):
        last = layout.stage_owner(layout.num_stages - 1)
        tied = _make("tied", [(pipeline[0], pipeline[last]) for pipeline in pipelines], rank, timeout_s)
    copies = kv_replicas(spec, layout.tp)
    kv_groups = [group[i : i + copies] for group in layout.groups("tp") for i in range(0, layout.tp, copies)]
    links: dict[Channel, Group] = {}
    for channel in sorted(channels):
        for pipeline in pipelines:
            pair = _make("pipeline", [(pipeline[channel.source], pipeline[channel.destination])], rank, timeout_s)
            if pair.handle is not None:
                links[channel] = pair
                _use_once(pair, device)
    kv = _make("kv", kv_groups, rank, timeout_s)
    return Groups(layout, rank, device, world, tp, cp, shards, across, kv, tied, links)


def _make(name: str, groups: list[tuple[int, ...]], rank: int, timeout_s: float) -> Group:
    """Make all of `groups` (every rank takes part in making each) and return the one that holds `rank`.

    `name` is for people: messages about a hang show it.
    """
    mine = alone(rank)
    for ranks in groups:
        if len(ranks) == 1:
            continue
        handle = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), group_desc=name)
        if rank in ranks:
            mine = Group(ranks, ranks.index(rank), handle)
    return mine


def _use_once(pair: Group, device: torch.device) -> None:
    token = torch.zeros(1, device=device)
    source, destination = pair.ranks
    if pair.rank == 0:
        dist.send(token, destination, group=pair.handle)
    else:
        dist.recv(token, source, group=pair.handle)

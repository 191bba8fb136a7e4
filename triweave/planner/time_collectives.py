"""Seconds of a collective over a group of ranks, inside a node and across nodes, from the machine's measured curves."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from triweave.layout import Axis, Layout
from triweave.planner.machine import Machine

GATHER_SHARE = 0.55
"""All-gather or reduce-scatter over the all-reduce of the same tensor: half the volume, at 0.67 of the link where the
all-reduce reaches 0.74 (SimuMax's B200 fit); 0.62 on two H200 at 1 GiB."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How the ranks of one group sit on the nodes."""

    ranks: int
    per_node: int
    """Ranks of the group inside one node; equal on every node."""

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return ceil(self.ranks / self.per_node)


def group_shape(layout: Layout, axis: Axis, gpus_per_node: int) -> GroupShape:
    """Shape of the groups along one axis, ranks numbered as `Layout` numbers them."""
    stride = {"tp": 1, "cp": layout.tp, "dp": layout.tp * layout.cp, "pp": layout.tp * layout.cp * layout.dp}[axis]
    ranks = layout.size(axis)
    return GroupShape(ranks, max(1, min(ranks, gpus_per_node // stride)))


def all_reduce_s(machine: Machine, group: GroupShape, size: float, *, rings: bool = False) -> float:
    """Seconds to sum a tensor of `size` bytes over the group.

    Across nodes NCCL's trees enter each node by the network ports of the group's own GPUs, so the bus runs at the
    slower of that and the node's own links; every other node adds a network latency. With `rings` the sum goes round
    all ranks and not from node to node: each node sends 2(ranks - 1)/ranks of it, in as many rounds (`Stack.rings`).
    """
    if group.ranks == 1 or size <= 0:
        return 0.0
    inside = _inside_s(machine, group.per_node, size)
    if group.nodes == 1:
        return inside
    across = all_reduce_ports_s(machine, group, size, rings=rings)
    rounds = 2 * (group.ranks - 1) if rings else 2 * log2(group.nodes)
    latency = rounds * machine.nic_round_s
    return max(inside, across) + latency


def all_reduce_ports_s(machine: Machine, group: GroupShape, size: float, *, rings: bool = False) -> float:
    """Seconds in which an all-reduce keeps the group's network ports busy; 0 inside a node."""
    if group.nodes == 1:
        return 0.0
    port = machine.nic_bytes_per_s * machine.nic_efficiency * group.per_node
    stops = group.ranks if rings else group.nodes
    return 2 * (stops - 1) / stops * size / port


def reduce_scatter_s(machine: Machine, group: GroupShape, size: float) -> float:
    """Seconds to sum a tensor of `size` bytes and leave each rank its slice; an all-gather takes as long."""
    if group.ranks == 1 or size <= 0:
        return 0.0
    known = machine.nvlink_gather.get(group.per_node)
    inside = known(size) if known is not None else GATHER_SHARE * _inside_s(machine, group.per_node, size)
    if group.nodes == 1:
        return inside
    port = machine.nic_bytes_per_s * machine.nic_efficiency * group.per_node
    across = (group.nodes - 1) / group.nodes * size / port
    latency = log2(group.nodes) * machine.nic_round_s
    return max(inside, across) + latency


def send_s(machine: Machine, size: float, *, crosses_nodes: bool) -> float:
    """Seconds of one message between two ranks."""
    if crosses_nodes:
        return machine.nic_latency_s + size / (machine.nic_bytes_per_s * machine.nic_efficiency)
    return machine.nvlink_send(size) if machine.nvlink_send is not None else _inside_s(machine, 2, size)


def _inside_s(machine: Machine, ranks: int, size: float) -> float:
    """All-reduce inside a node: the curve of that many ranks, or of the next larger measured group."""
    if ranks == 1:
        return 0.0
    curves = machine.nvlink_all_reduce
    if ranks in curves:
        return curves[ranks](size)
    known = min((count for count in curves if count >= ranks), default=max(curves))
    return curves[known](size) * ((ranks - 1) / ranks) / ((known - 1) / known)


def overlapped_s(communication: float, compute: float, slowdown: float) -> float:
    """Time beyond `compute` when `communication` runs beside it.

    What does not fit under the compute is exposed; while both run, the collective's kernels take a share `slowdown`
    of the processors (16 of 132 as Transformer Engine reserves them; Galvatron measures 1.1 to 1.3).
    """
    together = min(communication, compute)
    return max(0.0, communication - compute) + slowdown * together

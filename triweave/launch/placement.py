"""Which node holds which part of a layout, in words; and whether started ranks sit where the plan has them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from triweave.layout import Layout

MOST_LINES = 64
"""Nodes that a table shows."""


def node_ranks(layout: Layout, gpus_per_node: int) -> list[range]:
    """Ranks of each node: the plan numbers them node by node, whatever an engine does."""
    return [
        range(first, min(first + gpus_per_node, layout.world_size))
        for first in range(0, layout.world_size, gpus_per_node)
    ]


def describe_node(layout: Layout, ranks: Sequence[int]) -> str:
    """What a node holds.

    >>> describe_node(Layout(tp=8, pp=4), range(8, 16))
    'ranks 8-15: pp 1, dp 0, tp 0-7'
    >>> describe_node(Layout(dp=16, shard="full", shard_group=8), range(8, 16))
    'ranks 8-15: pp 0, dp 8-15, tp 0, shard group 1'
    """
    at = [layout.coordinates(rank) for rank in ranks]
    axes = {"pp": [one.pp for one in at], "dp": [one.dp for one in at], "cp": [one.cp for one in at]}
    axes["tp"] = [one.tp for one in at]
    if layout.uses_shard_groups:
        axes["shard group"] = [layout.shard_group_of(rank) for rank in ranks]
    parts = [f"{axis} {_spans(sorted(set(values)))}" for axis, values in axes.items() if axis != "cp" or layout.cp > 1]
    return f"ranks {_spans(sorted(ranks))}: {', '.join(parts)}"


def node_map(layout: Layout, gpus_per_node: int) -> list[str]:
    """One line a node, for the head of a file."""
    nodes = node_ranks(layout, gpus_per_node)
    lines = [f"node {number}: {describe_node(layout, ranks)}" for number, ranks in enumerate(nodes[:MOST_LINES])]
    return [*lines, *([f"... and {len(nodes) - MOST_LINES} more nodes"] if len(nodes) > MOST_LINES else [])]


def misplaced(layout: Layout, gpus_per_node: int, hosts: Sequence[str], node_order: Sequence[int | None]) -> list[str]:
    """How ranks that were started differ from the plan, as two maps side by side; empty if they sit as planned.

    Args:
        layout: the plan.
        gpus_per_node: ranks of a node.
        hosts: host name of every rank.
        node_order: for every rank, the number that the launch file gave its node; None where there was no such file.
    """
    planned = node_ranks(layout, gpus_per_node)
    # Nodes of the plan that share a host are nearer than planned, and do no harm.
    whole = all(len({hosts[rank] for rank in ranks}) == 1 for ranks in planned)
    numbered = all(node_order[rank] in (None, number) for number, ranks in enumerate(planned) for rank in ranks)
    if whole and numbered:
        return []
    left = [f"node {number}: {describe_node(layout, ranks)}" for number, ranks in enumerate(planned)]
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    right = []
    for host, ranks in by_host.items():
        given = node_order[ranks[0]]
        name = f"{host} (node {given} of the launch file)" if given is not None else host
        right.append(f"{name}: {describe_node(layout, ranks)}")
    rows = max(len(left), len(right))
    left += [""] * (rows - len(left))
    right += [""] * (rows - len(right))
    width = max(map(len, ["the plan", *left]))
    shown = [f"{one:<{width}}  |  {other}" for one, other in zip(left, right, strict=True)][:MOST_LINES]
    return [f"{'the plan':<{width}}  |  what was started", *shown]


def _spans(numbers: Sequence[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

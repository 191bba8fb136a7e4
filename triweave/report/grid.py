"""Which rank sits where, as an SVG string: a row a node, a cell a GPU, coloured and lettered by pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from triweave.layout import Layout

WIDTH = 960
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#999999", "#9fd6f5")
"""Of pipeline stages, in turn; the number in each cell is the second channel."""
_LEFT, _GAP = 84, 3


def draw_grid(layout: Layout, gpus_per_node: int) -> str:
    """One `<svg role="img">`: cells say pipeline stage, data-parallel, context-parallel and tensor-parallel place."""
    nodes = -(-layout.world_size // gpus_per_node)
    cell = min(104.0, (WIDTH - _LEFT) / gpus_per_node)
    small = nodes > 16
    height = 16 if small else 38
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {nodes * (height + 8) + 4}" '
        'font-size="11" fill="currentColor">',
        f"<title>{escape(str(layout))} on {nodes} node{'s' if nodes > 1 else ''} of {gpus_per_node}</title>",
        "<desc>A row a node, a cell a GPU; colour and first number are its pipeline stage.</desc>",
    ]
    for node in range(nodes):
        top = node * (height + 8) + 2
        lines.append(f'<text x="{_LEFT - 12}" y="{top + height / 2 + 4}" text-anchor="end">node {node}</text>')
        lines += _node(layout, node * gpus_per_node, gpus_per_node, top, cell, height, small=small)
    return "\n".join([*lines, "</svg>"])


def _node(
    layout: Layout, first: int, count: int, top: float, cell: float, height: int, *, small: bool
) -> Iterator[str]:
    for rank in range(first, min(first + count, layout.world_size)):
        at = layout.coordinates(rank)
        x = _LEFT + (rank - first) * cell
        group = f", shard group {layout.shard_group_of(rank)}" if layout.uses_shard_groups else ""
        context, short = (f" cp {at.cp},", f" c{at.cp}") if layout.cp > 1 else ("", "")
        yield (
            f'<rect x="{x:.1f}" y="{top}" width="{cell - _GAP:.1f}" height="{height}" rx="3" '
            f'fill="{COLOURS[at.pp % len(COLOURS)]}" stroke="#222" stroke-width=".6">'
            f"<title>rank {rank}: stage {at.pp}, dp {at.dp},{context} tp {at.tp}{group}</title></rect>"
        )
        middle = x + (cell - _GAP) / 2
        words = f"p{at.pp} d{at.dp}{short} t{at.tp}"
        if small:
            words = words if cell > 50 else f"p{at.pp}"
            place = f'x="{middle:.1f}" y="{top + 12}" text-anchor="middle"'
            yield f'<text {place} fill="#000" font-size="9.5">{words}</text>'
            continue
        yield (
            f'<text x="{middle:.1f}" y="{top + 16}" text-anchor="middle" fill="#000" font-weight="600">{rank}</text>'
            f'<text x="{middle:.1f}" y="{top + 30}" text-anchor="middle" fill="#000" font-size="10">{words}</text>'
        )

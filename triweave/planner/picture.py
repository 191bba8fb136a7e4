"""The picture of an answer: memory of every stage against the card, and the pipeline of a step in time, as one SVG.

Colours are Okabe and Ito's; every kind also has its place in the legend and in the order of a bar. Nothing is loaded,
nothing has an id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from triweave.planner.answer import spell_layout
from triweave.planner.assumptions import GIB
from triweave.planner.memory import StageMemory
from triweave.planner.request import Candidate, Request
from triweave.schedule import Timeline
from triweave.schedule.draw import duration
from triweave.schedule.svg import draw_svg

PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("#56b4e9", ("weights", "master weights")),
    "gradients": ("#e69f00", ("gradients", "weight gradient cache")),
    "moments": ("#009e73", ("moments", "optimizer step")),
    "activations": ("#f0e442", ("activations",)),
    "logits and loss": ("#cc79a7", ("logits and loss",)),
    "working set": ("#d55e00", ("working set", "sharding", "context parallel buffers", "p2p buffers", "workspace")),
    "driver and allocator": ("#999999", ()),
}
"""What a bar is made of, from left to right: its colour and the components of `StageMemory` it stands for; the last one
takes what no other names."""

_WIDTH, _LEFT, _RIGHT = 960, 60, 110
_TOP, _ROW, _BAR = 92, 20, 16
_OUTLINE = 'stroke="#222" stroke-width=".6"'


def draw_answer(request: Request, candidate: Candidate, timeline: Timeline) -> str:
    """One `<svg role="img">`: a headline, a memory bar for each pipeline rank, and the timeline below them."""
    bottom = _TOP + _ROW * len(candidate.memory)
    below = draw_svg(timeline)
    height = bottom + 54 + _height(below)
    title = escape(f"{request.model} on {request.cluster}")
    layout = escape(spell_layout(candidate.layout))
    step = duration(candidate.time.step_s)
    verdict = "fits" if candidate.fits else "does not fit"
    reading = (
        f"The step takes {step}, and the layout {verdict}: the fullest card needs {candidate.peak_bytes / GIB:.1f} GiB"
        f" of {request.capacity_bytes / GIB:.1f} GiB."
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">',
        f"<title>{title}: {layout}</title>",
        f"<desc>{escape(reading)} Above, memory of each pipeline rank; below, the pipeline of one step in time.</desc>",
        f'<text x="{_LEFT}" y="18" font-size="14">{title}</text>',
        f'<text x="{_LEFT}" y="36">{layout}</text>',
        f'<text x="{_LEFT}" y="54">{escape(reading)}</text>',
        *_legend(),
        *_memory(request, candidate),
        _placed(below, bottom + 46),
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def parts_of(stage: StageMemory) -> dict[str, int]:
    """Bytes of a stage by the parts of a bar; they add up to what the card uses."""
    sizes = dict.fromkeys(PARTS, 0)
    *_, rest = PARTS
    for name, size in stage.components.items():
        kind = name.partition(":")[0]
        sizes[next((part for part, (_, kinds) in PARTS.items() if kind in kinds), rest)] += size
    return sizes


def _memory(request: Request, candidate: Candidate) -> Iterator[str]:
    capacity = request.capacity_bytes
    scale = (_WIDTH - _LEFT - _RIGHT) / max(capacity, candidate.peak_bytes)
    for rank, stage in enumerate(candidate.memory):
        top, x = _TOP + _ROW * rank, float(_LEFT)
        yield f'<text x="{_LEFT - 6}" y="{top + 12}" text-anchor="end">stage {rank}</text>'
        for part, size in parts_of(stage).items():
            if size:
                width = size * scale
                shown = f"{part} {size / GIB:.1f} GiB"
                yield (
                    f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" '
                    f'fill="{PARTS[part][0]}" {_OUTLINE}><title>{shown}</title></rect>'
                )
                if len(f"{size / GIB:.1f}") * 6 + 4 <= width:
                    yield (
                        f'<text x="{x + width / 2:.1f}" y="{top + 12}" text-anchor="middle" fill="#000" font-size="10">'
                        f"{size / GIB:.1f}</text>"
                    )
                x += width
        yield f'<text x="{_WIDTH - _RIGHT + 8}" y="{top + 12}">{stage.used_bytes / GIB:.1f} GiB</text>'
    line, bottom = _LEFT + capacity * scale, _TOP + _ROW * len(candidate.memory)
    stroke = 'fill="none" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 3"'
    yield f'<path {stroke} d="M{line:.1f} {_TOP - 4}V{bottom + 2}"/>'
    yield f'<text x="{line:.1f}" y="{bottom + 14}" text-anchor="middle">{capacity / GIB:.1f} GiB a card gives</text>'


def _legend() -> Iterator[str]:
    x = float(_LEFT)
    for part, (colour, _) in PARTS.items():
        yield f'<rect x="{x:.1f}" y="64" width="14" height="14" fill="{colour}" {_OUTLINE}/>'
        yield f'<text x="{x + 20:.1f}" y="75">{part}</text>'
        x += 42 + 6.5 * len(part)


def _placed(svg: str, top: int) -> str:
    """A whole picture inside another one, unscaled, from `top` on."""
    return svg.rstrip().replace("<svg ", f'<svg y="{top}" width="{_WIDTH}" height="{_height(svg)}" ', 1)


def _height(svg: str) -> int:
    """Height of a picture that `draw_svg` made, from its view box."""
    view = svg.partition('viewBox="')[2].partition('"')[0]
    return int(view.split()[3])

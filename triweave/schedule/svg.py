"""Draws a timeline as an SVG string: one path a row and colour, so that 64 ranks x 256 micro-batches stay light.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; the letter of each kind is the second channel
where it fits. Idle time is drawn, and counted at the end of its row. Nothing is loaded, nothing has an id, so
several pictures may stand on one page.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape

from triweave.schedule.actions import Kind
from triweave.schedule.draw import NAMES, duration, headline, kinds, letters, percent, row_name, stages_per_rank
from triweave.schedule.simulate import Span, Timeline

COLOURS = {
    Kind.FORWARD: ("#56b4e9", "#aad9f4"),
    Kind.BACKWARD: ("#e69f00", "#f2cf80"),
    Kind.BACKWARD_INPUT: ("#e69f00", "#f2cf80"),
    Kind.BACKWARD_WEIGHT: ("#009e73", "#80ceb9"),
}
"""Fill of each kind, and its tint for every second virtual stage of a rank. Black text reads on all of them."""

_WIDTH, _LEFT, _RIGHT = 960, 60, 60
_TOP, _ROW, _BAR = 30, 20, 16
_HATCH = f'fill="none" stroke="#999" stroke-width="{_BAR}" stroke-dasharray="1 3"'
"""Idle is a line as thick as a bar, dashed: a hatch that needs no pattern, so no id."""
_GLYPHS = 'fill="#000" font-family="ui-monospace, monospace" font-size="9"'
_GLYPH = 5.4
"""Advance of those letters inside the bars, in pixels."""
_OUTLINE = ' stroke="#222" stroke-width=".6"'
"""Around bars with a letter in them: sky blue and orange alone are too pale against white."""


def draw_svg(timeline: Timeline, axis_s: float | None = None) -> str:
    """The timeline as one `<svg role="img">`; its title is the headline, its description the key to the letters.

    Args:
        timeline: What to draw.
        axis_s: Seconds that the full width stands for. Give two pictures the longer of their lengths, and the eye can
            compare them; left out, the timeline fills the width.
    """
    axis_s = max(timeline.total_s, axis_s or 0.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / (axis_s or 1.0)
    bottom = _TOP + _ROW * len(timeline.spans)
    labels = _labels(timeline, scale)
    title = escape(headline(timeline))
    key = ", ".join(f"{kind.value} {NAMES[kind]}" for kind in kinds(timeline))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {bottom + 30}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">',
        f"<title>{title}</title>",
        f"<desc>One row a pipeline rank, time from left to right. {key}; hatched is idle, its share at the end.</desc>",
        *_legend(timeline),
    ]
    for rank, spans in enumerate(timeline.spans):
        lines += _row(timeline, rank, spans, scale, labels)
    return "\n".join([*lines, *_axis(axis_s, scale, bottom), "</svg>", ""])


def _row(timeline: Timeline, rank: int, spans: Sequence[Span], scale: float, labels: dict[Kind, int]) -> list[str]:
    """Name, idle time, bars, letters and idle share of one rank."""
    top, middle = _TOP + _ROW * rank, _TOP + _ROW * rank + _BAR / 2
    bars: defaultdict[tuple[Kind, int], list[str]] = defaultdict(list)
    idle: list[str] = []
    glyphs: list[tuple[str, float]] = []
    now = 0.0
    for span in spans:
        idle += _gap(now, span.start_s, scale, middle)
        now = span.end_s
        left, right = _x(span.start_s, scale), _x(span.end_s, scale)
        tint = span.action.stage // timeline.schedule.pp % 2
        bars[span.action.kind, tint].append(f"M{_n(left)} {top}h{_n(right - left)}v{_BAR}h{_n(left - right)}z")
        if shown := labels[span.action.kind]:
            text = (letters(timeline, span.action) + str(span.action.micro_batch))[:shown]
            first = (left + right - _GLYPH * len(text)) / 2
            glyphs += [(glyph, first + _GLYPH * i) for i, glyph in enumerate(text)]
    idle += _gap(now, timeline.total_s, scale, middle)
    outline = _OUTLINE if all(labels.values()) else ""
    share = percent(1.0 - sum(span.duration_s for span in spans) / timeline.total_s if timeline.total_s else 0.0)
    lines = [f'<text x="{_LEFT - 6}" y="{top + 12}" text-anchor="end">{row_name(timeline, rank)}</text>']
    if idle:
        lines.append(f'<path class="idle" {_HATCH} d="{"".join(idle)}"/>')
    for (kind, tint), path in sorted(bars.items(), key=lambda item: (item[0][0].value, item[0][1])):
        lines.append(f'<path class="{_css(kind)}" fill="{COLOURS[kind][tint]}"{outline} d="{"".join(path)}"/>')
    if glyphs:
        places = " ".join(_n(x) for _, x in glyphs)
        text = "".join(glyph for glyph, _ in glyphs)
        lines.append(f'<text x="{places}" y="{top + 11}" {_GLYPHS}>{text}</text>')
    lines.append(f'<text x="{_WIDTH - _RIGHT + 6}" y="{top + 12}">{share}</text>')
    return lines


def _gap(start_s: float, end_s: float, scale: float, middle: float) -> list[str]:
    left, right = _x(start_s, scale), _x(end_s, scale)
    return [f"M{_n(left)} {_n(middle)}h{_n(right - left)}"] if right - left >= 0.1 else []


def _labels(timeline: Timeline, scale: float) -> dict[Kind, int]:
    """How many characters every bar of a kind has room for: all of its label, the letter of the kind, or none."""
    present = kinds(timeline)
    narrowest, longest = dict.fromkeys(present, math.inf), dict.fromkeys(present, 1)
    for spans in timeline.spans:
        for span in spans:
            kind = span.action.kind
            narrowest[kind] = min(narrowest[kind], span.duration_s * scale)
            longest[kind] = max(longest[kind], len(letters(timeline, span.action) + str(span.action.micro_batch)))
    return {
        kind: next((size for size in (longest[kind], 1) if _GLYPH * size + 2 <= narrowest[kind]), 0) for kind in present
    }


def _legend(timeline: Timeline) -> list[str]:
    """A swatch for each kind that occurs, and for idle with its share."""
    lines, x = [], float(_LEFT)
    for kind in kinds(timeline):
        lines.append(f'<path fill="{COLOURS[kind][0]}" {_OUTLINE[1:]} d="M{_n(x)} 6h14v14h-14z"/>')
        lines.append(f'<text x="{_n(x + 4.3)}" y="16" {_GLYPHS}>{kind.value}</text>')
        lines.append(f'<text x="{_n(x + 20)}" y="17">{NAMES[kind]}</text>')
        x += 44 + 6 * len(NAMES[kind])
    lines.append(f'<path {_HATCH} d="M{_n(x)} 13h14"/>')
    tints = "" if stages_per_rank(timeline) == 1 else "; lighter: every second virtual stage of a rank"
    lines.append(f'<text x="{_n(x + 20)}" y="17">idle {percent(timeline.bubble_of_total)}{tints}</text>')
    lines.append(f'<text x="{_WIDTH - _RIGHT + 6}" y="17">idle</text>')
    return lines


def _axis(axis_s: float, scale: float, bottom: int) -> list[str]:
    """A line under the rows with marks at round times."""
    step = _round_step(axis_s)
    marks = [i * step for i in range(int(axis_s / step + 1e-9) + 1)] if step else [0.0]
    ticks = "".join(f"M{_n(_x(mark, scale))} {bottom}v5" for mark in marks)
    labels = [
        f'<text x="{_n(_x(mark, scale))}" y="{bottom + 17}" text-anchor="middle">{duration(mark) if mark else 0}</text>'
        for mark in marks
    ]
    return [f'<path fill="none" stroke="currentColor" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}{ticks}"/>', *labels]


def _round_step(axis_s: float) -> float:
    """1, 2 or 5 times a power of ten, so that about eight steps fill the axis; 0 if there is nothing to fill."""
    if axis_s <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(axis_s / 8))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if axis_s / step <= 8 + 1e-9)


def _css(kind: Kind) -> str:
    return NAMES[kind].replace(" ", "-")


def _x(seconds: float, scale: float) -> float:
    """Where a time lies, rounded first: bars that touch in time then touch in the picture."""
    return round(_LEFT + seconds * scale, 2)


def _n(number: float) -> str:
    """The shortest way to write a coordinate to a hundredth."""
    return f"{number:.2f}".rstrip("0").rstrip(".")

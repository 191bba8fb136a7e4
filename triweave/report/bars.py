"""Stacked bars, one above the other on one scale, as an SVG string: what was said over what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from triweave.report.curve import round_step

WIDTH = 960
_LEFT, _RIGHT, _ROW, _BAR, _LEGEND = 150, 86, 27, 19, 18
_OUTLINE = 'stroke="#222" stroke-width=".6"'


@dataclass(frozen=True, slots=True)
class Part:
    """What a piece of a bar looks like. Dark letters read on all of these colours but blue and black."""

    colour: str
    letter: str


PARTS: Mapping[str, Part] = {
    # Memory, from what stands to what comes and goes.
    "weights": Part("#56b4e9", "W"),
    "gradients": Part("#e69f00", "G"),
    "master weights": Part("#009e73", "M"),
    "optimizer moments": Part("#cc79a7", "O"),
    "activations and the rest": Part("#f0e442", "A"),
    # Time.
    "matmul": Part("#56b4e9", "P"),
    "attention": Part("#f0e442", "A"),
    "memory bound": Part("#009e73", "M"),
    "tensor parallel": Part("#cc79a7", "T"),
    "context parallel": Part("#999999", "X"),
    "host": Part("#d9d9d9", "H"),
    "data parallel": Part("#0072b2", "D"),
    "optimizer": Part("#e69f00", "U"),
    "computing": Part("#56b4e9", "C"),
    "idle in the pipeline": Part("#d55e00", "I"),
    "outside of the pipeline": Part("#e69f00", "O"),
    "step": Part("#bbbbbb", "S"),
}
NAMES = {"matmul": "matrix products", "memory bound": "memory-bound operations", "optimizer": "optimizer update"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar."""

    name: str
    parts: Mapping[str, float]
    note: str = ""
    """At its end; left out, the sum."""
    faint: bool = False
    """What was said is paler than what was measured."""


def draw_bars(
    bars: Sequence[Bar], *, title: str, reading: str, unit: str, limit: float | None = None, limit_name: str = ""
) -> str:
    """One `<svg role="img">`.

    Args:
        bars: from top to bottom.
        title: what it is.
        reading: one sentence that says what to see.
        unit: of every number.
        limit: a line down: a card's capacity.
        limit_name: what it is.
    """
    longest = max([sum(bar.parts.values()) for bar in bars] + ([limit] if limit else []))
    scale = (WIDTH - _LEFT - _RIGHT) / (longest or 1.0)
    keys = list(dict.fromkeys(name for bar in bars for name, size in bar.parts.items() if size > 0))
    legend, legend_rows = _legend(keys)
    top = 10 + _LEGEND * legend_rows + 10
    bottom = top + _ROW * len(bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {bottom + 34}" font-size="11.5" '
        'fill="currentColor">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(reading)}</desc>",
        *legend,
    ]
    for index, bar in enumerate(bars):
        lines += _bar(bar, top + _ROW * index, scale)
    lines += _axis(longest, scale, bottom, unit)
    if limit:
        x = _LEFT + limit * scale
        lines.append(
            f'<path fill="none" stroke="currentColor" stroke-width="1.6" stroke-dasharray="5 3" '
            f'd="M{x:.1f} {top - 6}V{bottom + 4}"/>'
        )
        anchor = "end" if x > WIDTH - _RIGHT - 40 else "middle"
        lines.append(f'<text x="{x:.1f}" y="{top - 9}" text-anchor="{anchor}">{escape(limit_name)}</text>')
    return "\n".join([*lines, "</svg>"])


def _bar(bar: Bar, top: float, scale: float) -> Iterator[str]:
    weight = "400" if bar.faint else "600"
    yield (f'<text x="{_LEFT - 10}" y="{top + 14}" text-anchor="end" font-weight="{weight}">{escape(bar.name)}</text>')
    x = float(_LEFT)
    opacity = ' fill-opacity=".62"' if bar.faint else ""
    for name, size in bar.parts.items():
        width, part = size * scale, PARTS[name]
        if width < 0.2:
            continue
        yield (
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{part.colour}" {_OUTLINE}{opacity}>'
            f"<title>{escape(NAMES.get(name, name))} {_size(size)}</title></rect>"
        )
        text = f"{part.letter} {_size(size)}"
        text = text if len(text) * 6.2 + 4 < width else part.letter if width > 11 else ""
        if text:
            ink = "#fff" if part.colour == "#0072b2" else "#000"
            yield (
                f'<text x="{x + width / 2:.1f}" y="{top + 13.5}" text-anchor="middle" fill="{ink}" '
                f'font-size="10.5">{text}</text>'
            )
        x += width
    note = bar.note or _size(sum(bar.parts.values()))
    yield f'<text x="{x + 8:.1f}" y="{top + 14}" font-weight="{weight}">{escape(note)}</text>'


def _size(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _legend(keys: Sequence[str]) -> tuple[list[str], int]:
    lines, x, row = [], float(_LEFT), 0
    for key in keys:
        name, part = NAMES.get(key, key), PARTS[key]
        width = 34 + 6.4 * len(name)
        if x + width > WIDTH - 10:
            x, row = float(_LEFT), row + 1
        y = 4 + _LEGEND * row
        ink = "#fff" if part.colour == "#0072b2" else "#000"
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="15" height="13" fill="{part.colour}" {_OUTLINE}/>')
        lines.append(
            f'<text x="{x + 7.5:.1f}" y="{y + 10}" text-anchor="middle" fill="{ink}" font-size="9.5">'
            f"{part.letter}</text>"
        )
        lines.append(f'<text x="{x + 21:.1f}" y="{y + 10.5}">{escape(name)}</text>')
        x += width
    return lines, row + 1


def _axis(longest: float, scale: float, bottom: float, unit: str) -> Iterator[str]:
    step = round_step(longest or 1.0, 8)
    marks = [i * step for i in range(int((longest or 1.0) / step + 1e-9) + 1)]
    ticks = "".join(f"M{_LEFT + mark * scale:.1f} {bottom}v5" for mark in marks)
    yield f'<path fill="none" stroke="currentColor" stroke-opacity=".6" d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}{ticks}"/>'
    for mark in marks:
        text = f"{mark:.4g}" + (f" {unit}" if mark == marks[-1] else "")
        place = f'x="{_LEFT + mark * scale:.1f}" y="{bottom + 19}" text-anchor="middle"'
        yield f'<text {place} fill-opacity=".8">{text}</text>'

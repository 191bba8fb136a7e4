"""A curve over steps as an SVG string: a line for the trend, a band of least and most for what each pixel hides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 460, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 26
COLUMNS = 380
"""More points than this are drawn as the least and the most of each column: the picture's size does not grow."""


def draw_curve(
    points: Points,
    *,
    title: str,
    reading: str,
    colour: str,
    letter: str,
    level: float | None = None,
    level_name: str = "",
    also: Points = (),
    percent: bool = False,
) -> str:
    """One `<svg role="img">`.

    Args:
        points: step and value, in order.
        title: what it is, with its unit.
        reading: one sentence that says what to see.
        colour: of the line.
        letter: at its end, the second channel beside colour.
        level: a line across: a forecast, a capacity.
        level_name: what that is.
        also: points apart from the line: held-out losses.
        percent: whether values are shares.
    """
    values = [value for _, value in (*points, *also)] + ([level] if level is not None else [])
    low, high = _range(values)
    if level is not None and level > high - 0.25 * (high - low):
        high = level + 0.25 * (high - low)  # room for its name above it
    first, last = points[0][0], points[-1][0]

    def x(step: float) -> float:
        return _LEFT + (step - first) / ((last - first) or 1) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="11" '
        'fill="currentColor">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(reading)}</desc>",
        *_grid(low, high, y, percent=percent),
        *_steps(first, last, x),
    ]
    if level is not None:
        at = y(level)
        lines.append(
            f'<path fill="none" stroke="currentColor" stroke-dasharray="5 3" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>'
        )
        lines.append(f'<text x="{WIDTH - _RIGHT}" y="{at - 6:.1f}" text-anchor="end">{escape(level_name)}</text>')
    lines += _line([(x(step), y(value)) for step, value in points], colour)
    for step, value in also:
        lines.append(
            f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5" fill="#e69f00" stroke="#222" stroke-width=".8"/>'
        )
    end_x, end_y = x(last), y(points[-1][1])
    lines.append(f'<circle cx="{end_x:.1f}" cy="{end_y:.1f}" r="7" fill="{colour}"/>')
    lines.append(
        f'<text x="{end_x:.1f}" y="{end_y + 3.5:.1f}" text-anchor="middle" fill="#fff" font-size="10" '
        f'font-weight="700">{escape(letter)}</text>'
    )
    return "\n".join([*lines, "</svg>"])


def number(value: float, *, percent: bool = False) -> str:
    """Three digits, and an SI letter for what is large."""
    if percent:
        return f"{100 * value:.3g} %"
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def _line(places: Sequence[tuple[float, float]], colour: str) -> list[str]:
    if len(places) == 1:
        return []
    if len(places) <= COLUMNS:
        path = "L".join(f"{left:.1f} {top:.1f}" for left, top in places)
        return [f'<path fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round" d="M{path}"/>']
    columns: dict[int, list[float]] = {}
    for left, top in places:
        columns.setdefault(round(left), []).append(top)
    band = "".join(f"M{left} {min(tops):.1f}V{max(tops) + 0.5:.1f}" for left, tops in columns.items())
    middle = "L".join(f"{left} {sum(tops) / len(tops):.1f}" for left, tops in columns.items())
    return [
        f'<path fill="none" stroke="{colour}" stroke-width="1" stroke-opacity=".35" d="{band}"/>',
        f'<path fill="none" stroke="{colour}" stroke-width="1.6" d="M{middle}"/>',
    ]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
    return (0.0 if 0 <= low < 0.4 * high else low - room), high + room


def _grid(low: float, high: float, y: Callable[[float], float], *, percent: bool) -> Iterator[str]:
    step = round_step(high - low, 5)
    mark = math.ceil(low / step) * step
    while mark <= high:
        at = y(mark)
        yield f'<path stroke="currentColor" stroke-opacity=".14" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>'
        text = number(0.0 if abs(mark) < step / 1e6 else mark, percent=percent)
        yield f'<text x="{_LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end" fill-opacity=".75">{text}</text>'
        mark += step


def _steps(first: float, last: float, x: Callable[[float], float]) -> Iterator[str]:
    step = max(1.0, round_step(last - first or 1.0, 6))
    marks = [mark for i in range(8) if first <= (mark := math.ceil(first / step) * step + i * step) <= last]
    for mark in marks:
        yield f'<text x="{x(mark):.1f}" y="{HEIGHT - 8}" text-anchor="middle" fill-opacity=".75">{number(mark)}</text>'


def round_step(length: float, about: int) -> float:
    """1, 2 or 5 times a power of ten, so that about so many steps fill the length."""
    power: float = 10.0 ** math.floor(math.log10(length / about))
    return next(size for size in (power, 2 * power, 5 * power, 10 * power) if length / size <= about + 1e-9)

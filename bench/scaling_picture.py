"""The picture of `bench/scaling.py`: one panel a curve, measured as a line, predicted as a dashed one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import log2
from typing import Any

MEASURED, PREDICTED = "#0072b2", "#d55e00"
"""Okabe and Ito's blue and vermilion."""
_WIDTH, _HEIGHT, _COLUMNS = 300, 200, 3
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 30, 30


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """One `<svg role="img">` of tokens a second of a GPU against what grows, each panel from zero."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "step_s" in row:
            curves.setdefault(row["curve"], []).append(row)
    lines = -(-max(len(curves), 1) // _COLUMNS)
    width, height = _COLUMNS * _WIDTH, lines * _HEIGHT + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">',
        "<title>Tokens a second of a GPU, measured and predicted</title>",
        *_legend(height),
    ]
    for number, (name, points) in enumerate(curves.items()):
        x, y = number % _COLUMNS * _WIDTH, number // _COLUMNS * _HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(name, points), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, points: list[dict[str, Any]]) -> Iterator[str]:
    measured, predicted = (
        [point["tokens"] / point[key] / point["gpus"] for point in points] for key in ("step_s", "predicted_step_s")
    )
    top = 1.1 * max(*measured, *predicted)
    first, last = (log2(points[end]["x"]) for end in (0, -1))
    inner, bottom = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM

    def across(point: dict[str, Any]) -> float:
        return _LEFT + inner * (log2(point["x"]) - first) / max(last - first, 1e-9)

    def up(value: float) -> float:
        return bottom - (bottom - _TOP) * value / top

    yield f'<text x="{_LEFT}" y="18">{escape(name)}</text>'
    yield f'<path fill="none" stroke="currentColor" d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}"/>'
    for value in (0.0, top / 2.2, top / 1.1):
        yield f'<text x="{_LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value:,.0f}</text>'
    for point in points:
        yield f'<text x="{across(point):.1f}" y="{bottom + 16}" text-anchor="middle">{_short(point["x"])}</text>'
    for values, colour, dashes in ((predicted, PREDICTED, ' stroke-dasharray="5 3"'), (measured, MEASURED, "")):
        places = [(across(point), up(value)) for point, value in zip(points, values, strict=True)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        yield f'<path fill="none" stroke="{colour}" stroke-width="2"{dashes} d="M{path}"/>'
        for x, y in places if not dashes else []:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def _legend(height: int) -> Iterator[str]:
    for x, colour, dashes, name in (
        (52, MEASURED, "", "measured"),
        (160, PREDICTED, ' stroke-dasharray="5 3"', "predicted"),
    ):
        yield f'<path fill="none" stroke="{colour}" stroke-width="2"{dashes} d="M{x} {height - 12}h24"/>'
        yield f'<text x="{x + 30}" y="{height - 8}">{name}</text>'


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)

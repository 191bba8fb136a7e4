"""Draws a timeline as plain text: a row a pipeline rank, two characters a unit of time, readable without colour.

    stage 0 F0F1............B0  F2B1  ..B2
    stage 1 ..F0B0  F1B1  ......F2B2  ....

Too wide a picture is cut where it repeats itself; what is left out is counted.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from triweave.schedule.actions import Action, Kind
from triweave.schedule.simulate import Span, Timeline

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}
"""What each letter stands for, in the order of every legend."""

_CUT = " ~ "
_LONGEST_UNITS = 8
"""An action this many units long is drawn in full; the shortest ones give way, not the width of the page."""


def draw_timeline(timeline: Timeline, width: int = 80) -> str:
    """The timeline as lines of at most `width` characters: one a pipeline rank, between a headline and a legend.

    `F3` is the forward of micro-batch 3 (or 13: the last digit stands for the number), blanks say that it goes on,
    dots are idle. With several virtual stages a rank, a letter tells them apart: `Fa3`, `Fb3`. A picture that is too
    wide shows the warm-up, one steady period and the cool-down.
    """
    unit_s = _unit_s(timeline)
    cell = 2 if stages_per_rank(timeline) == 1 else 3
    names = [f"{row_name(timeline, rank)} " for rank in range(len(timeline.spans))]
    name_width = max(len(name) for name in names)
    rows = [_cells(timeline, spans, unit_s, cell) for spans in timeline.spans]
    room = width - name_width
    parts, left_out = _fit(timeline, unit_s, len(rows[0]), cell, room)
    pictures = (_CUT.join("".join(row[first:end]) for first, end in parts) for row in rows)
    legend = [f"{kind.value} {NAMES[kind]}" for kind in kinds(timeline)]
    if timeline.schedule.num_micro_batches > 10:
        legend.append("the digit is the last of the micro-batch's number")
    legend += [". idle", f"{cell} characters are {duration(unit_s)}", *left_out]
    return "\n".join(
        [
            *textwrap.wrap(headline(timeline), width),
            *((name.ljust(name_width) + picture).rstrip() for name, picture in zip(names, pictures, strict=True)),
            *textwrap.wrap("; ".join(legend), width),
        ]
    )


def headline(timeline: Timeline) -> str:
    """One sentence that says what to see: the schedule, its length, how much of it is idle."""
    schedule, vpp = timeline.schedule, stages_per_rank(timeline)
    pipeline = f"pp {schedule.pp}" if vpp == 1 else f"pp {schedule.pp} x vpp {vpp}"
    return (
        f"{schedule.name}, {pipeline}, micro-batches {schedule.num_micro_batches}: {duration(timeline.total_s)}, "
        f"{percent(timeline.bubble_of_total)} idle"
    )


def stages_per_rank(timeline: Timeline) -> int:
    """Virtual stages that each pipeline rank holds."""
    return timeline.schedule.num_stages // timeline.schedule.pp


def row_name(timeline: Timeline, rank: int) -> str:
    """Name of a row: a rank with one stage is called by its stage."""
    return f"{'stage' if stages_per_rank(timeline) == 1 else 'rank'} {rank}"


def kinds(timeline: Timeline) -> list[Kind]:
    """The kinds of action that occur, in the order of the legend."""
    present = {span.action.kind for spans in timeline.spans for span in spans}
    return [kind for kind in NAMES if kind in present]


def letters(timeline: Timeline, action: Action) -> str:
    """Kind of `action` and, where a rank holds several virtual stages, which of them: a is its first."""
    chunk = "" if stages_per_rank(timeline) == 1 else chr(ord("a") + action.stage // timeline.schedule.pp % 26)
    return action.kind.value + chunk


def duration(seconds: float) -> str:
    """Three digits and a unit: `1.25 s`, `33 ms`, `180 us`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def percent(share: float) -> str:
    """A share from 0 to 1 as `27.3 %`."""
    return f"{100 * share:.1f} %"


def _unit_s(timeline: Timeline) -> float:
    """Seconds of one unit: the shortest action, so that each is seen, unless others are very much longer."""
    durations = [span.duration_s for spans in timeline.spans for span in spans if span.duration_s > 0]
    return max(min(durations), max(durations) / _LONGEST_UNITS) if durations else 1.0


def _column(seconds: float, unit_s: float) -> int:
    """The unit whose left edge is nearest. The nudge keeps sums of equal floats on the same side of a half."""
    return math.floor(seconds / unit_s + 0.5 + 1e-6)


def _cells(timeline: Timeline, spans: Sequence[Span], unit_s: float, cell: int) -> list[str]:
    """One string of `cell` characters a unit, from the start of the step to its end."""
    cells = ["." * cell] * _column(timeline.total_s, unit_s)
    for span in spans:
        first, end = _column(span.start_s, unit_s), _column(span.end_s, unit_s)
        for i in range(first, end):
            cells[i] = " " * cell
        if first < end:
            cells[first] = f"{letters(timeline, span.action)}{span.action.micro_batch % 10}"
    return cells


def _fit(
    timeline: Timeline, unit_s: float, num_units: int, cell: int, room: int
) -> tuple[list[tuple[int, int]], list[str]]:
    """Ranges of units to draw in `room` characters, and what to say of those left out."""
    if num_units * cell <= room:
        return [(0, num_units)], []
    parts, left_out, first = [], [], 0
    for cut_s, resume_s, periods in _repetitions(timeline):
        parts.append((first, _column(cut_s, unit_s)))
        first = _column(resume_s, unit_s)
        left_out.append(f"~ leaves out {periods} repetitions of {duration((resume_s - cut_s) / periods)}")
    parts.append((first, num_units))
    if sum(end - first for first, end in parts) * cell + len(_CUT) * len(left_out) <= room:
        return parts, left_out
    units = max(0, room - len(_CUT)) // cell
    head, tail = units - units // 2, units // 2
    return [(0, head), (num_units - tail, num_units)], [f"~ leaves out {duration((num_units - units) * unit_s)}"]


def _repetitions(timeline: Timeline) -> list[tuple[float, float, int]]:
    """Where the picture repeats itself: from when to when it may be cut, in seconds, and how many periods that is.

    1F1B and its kin are steady from the moment every rank has a backward until one runs out of forwards. GPipe has no
    such time; its forwards and its backwards are each steady while all ranks run them.
    """
    forwards = [[span for span in spans if span.action.kind is Kind.FORWARD] for spans in timeline.spans]
    backwards = [
        [span for span in spans if span.action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)] for spans in timeline.spans
    ]
    windows = [(backwards, forwards)]
    if max(rank[0].start_s for rank in backwards) >= min(rank[-1].end_s for rank in forwards):
        windows = [(forwards, forwards), (backwards, backwards)]
    vpp = stages_per_rank(timeline)
    period = 1 if vpp == 1 else vpp * timeline.schedule.pp
    found = []
    for begin, end in windows:
        start_s, end_s = max(rank[0].start_s for rank in begin), min(rank[-1].end_s for rank in end)
        slowest = max(begin, key=lambda rank: rank[0].start_s)
        marks = [span.start_s for span in slowest if start_s <= span.start_s <= end_s][::period]
        if len(marks) > 2:
            found.append((marks[1], marks[-1], len(marks) - 2))
    return found

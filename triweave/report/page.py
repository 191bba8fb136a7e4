"""The page: sections in the order in which questions come up, each a sentence, a picture and its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from triweave import __version__
from triweave.layout import Layout
from triweave.report.bars import NAMES, Bar, draw_bars
from triweave.report.curve import draw_curve
from triweave.report.grid import draw_grid
from triweave.report.read import RunRecord, measured_pipeline, predicted_pipeline
from triweave.report.style import STYLE
from triweave.report.summary import off, summary
from triweave.schedule.draw import duration, percent
from triweave.schedule.simulate import Timeline
from triweave.schedule.svg import draw_svg

CLOSE = {"step_s": 0.08, "memory": 0.01}
"""Errors up to these are told in green."""
Numbers = Mapping[str, Any]


def page(record: RunRecord) -> str:
    """The whole document. It has no script and loads nothing: the policy in its head forbids it."""
    said = summary(record)
    parts = [
        _head(record, said),
        *_cards(said),
        *_step(record, said),
        *_pipeline(record),
        *_memory(record, said),
        *_curves(record, said),
        *_grid(record),
        *_events(record),
        *_sources(record),
    ]
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(record.name)}: triweave report</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
<footer>triweave {__version__} · made from {escape(record.name)} alone; this page loads nothing from elsewhere</footer>
</main>
</body>
</html>
"""


def _head(record: RunRecord, said: Numbers) -> str:
    where = " on ".join(filter(None, (said["layout"], said["cluster"])))
    kicker = f"triweave report{' · ' + escape(where) if where else ''}"
    return (
        f'<header><p class="kicker">{kicker}</p><h1>{escape(record.name)}</h1>'
        f'<p class="verdict">{_sentence(verdict(said))}</p></header>'
    )


def verdict(said: Numbers) -> str:
    """What came out, in two or three sentences."""
    if not said["steps"]:
        return "No step is done yet: what follows is what was said of the run before it began."
    sentences = []
    step = said["step_s"]
    apart = off(step["predicted"], step["measured"])
    told = ""
    if apart is not None:
        slower = apart < 0
        told = f", {percent(abs(1 / (1 + apart) - 1))} {'longer' if slower else 'shorter'} than predicted"
    sentences.append(f"{said['steps']:,} steps are done, and a step takes {duration(step['measured'])}{told}.")
    peak = said["peak_allocated_gib"]
    if peak["measured"] and said["capacity_gib"]:
        sentences.append(f"Tensors took {peak['measured']:.1f} GiB of the card's {said['capacity_gib']:.1f} at most.")
    first, last = said["loss"]["first"], said["loss"]["last"]
    if said["steps"] > 1 and first is not None and last is not None:
        moved = "fell" if last < first else "rose"
        sentences.append(f"The loss {moved} from {first:.3f} to {last:.3f}.")
    return " ".join(sentences)


def _cards(said: Numbers) -> Iterator[str]:
    step, mfu, peak, loss = said["step_s"], said["mfu_causal"], said["peak_allocated_gib"], said["loss"]
    yield '<div class="cards">'
    value = duration(step["measured"]).split() if step["measured"] else ["–", ""]
    low_high = step["range"]
    told = ""
    if step["predicted"]:
        told = f"{duration(step['predicted'])} predicted{_apart(off(step['predicted'], step['measured']), 'step_s')}"
        told += f"<br>range {duration(low_high[0])} to {duration(low_high[1])}"
    yield _card("Step time, median", value[0], value[1], told or "nothing was predicted of time")
    if mfu["measured"] is not None:
        told = f"{percent(mfu['predicted'])} predicted; " if mfu["predicted"] else ""
        full = said["mfu_full"]["measured"]
        yield _card("MFU, causal", f"{100 * mfu['measured']:.1f}", "%", f"{told}{percent(full)} with full attention")
    speed = said["tokens_per_s_per_gpu"]
    if speed["measured"] is not None and mfu["measured"] is None:
        yield _card("Throughput", f"{speed['measured']:,.0f}", "tokens/s/GPU", "MFU is not known on this device")
    if peak["measured"] is not None:
        told = ""
        if any(stage["measured_gib"] for stage in said["stages"]):
            told = f"{peak['predicted']:.2f} predicted{_apart(off(peak['predicted'], peak['measured']), 'memory')}"
        room = said["capacity_gib"]
        told += f"<br>of {room:.1f} GiB a card" if room else ""
        yield _card("Peak memory", f"{peak['measured']:.2f}", "GiB", told or "resident memory of a process on the CPU")
    if loss["last"] is not None:
        held_out = [value for value in said["validation"].values() if value is not None]
        told = f"held out {held_out[-1]:.4f}" if held_out else f"{loss['first']:.4f} at the first step"
        yield _card("Loss", f"{loss['last']:.4f}", "", told)
    if said["goodput"]:
        yield _card(
            "Goodput", f"{100 * said['goodput']:.1f}", "%", "of the time since the first start on steps that count"
        )
    yield "</div>"


def _card(name: str, value: str, unit: str, sub: str) -> str:
    return (
        f'<div class="card"><div class="name">{name}</div><div class="value">{value}'
        f'{f"<small>{unit}</small>" if unit else ""}</div><div class="sub">{sub}</div></div>'
    )


def _apart(apart: float | None, what: str) -> str:
    if apart is None:
        return ""
    return f' (<span class="{"good" if abs(apart) <= CLOSE[what] else "bad"}">{100 * apart:+.2f} %</span>)'


def _step(record: RunRecord, said: Numbers) -> Iterator[str]:
    """Where the seconds go: the plan's parts, and what was seen of the run."""
    step = record.forecast["step"] if record.forecast else None
    measured = said["step_s"]["measured"]
    if step is None or not measured:
        return
    named = {"pipeline": "idle in the pipeline"}
    parts = {
        named.get(name, name.replace("_", " ")): 1e3 * seconds
        for name, seconds in step["parts_s"].items()
        if seconds > 0
    }
    bars = [Bar("predicted", parts, f"{1e3 * step['step_s']:.1f} ms", faint=True)]
    timeline = measured_pipeline(record)
    if timeline is None:
        bars.append(Bar("measured", {"step": 1e3 * measured}, f"{1e3 * measured:.1f} ms"))
    else:
        busy = max(timeline.busy_s)
        rest = max(0.0, measured - timeline.total_s)
        seen = {"computing": busy, "idle in the pipeline": timeline.total_s - busy, "outside of the pipeline": rest}
        note = f"{1e3 * measured:.1f} ms"
        bars.append(Bar("measured", {name: 1e3 * seconds for name, seconds in seen.items()}, note))
    largest = max(parts, key=lambda name: parts[name])
    share = parts[largest] / sum(parts.values())
    what = NAMES.get(largest, largest)
    reading = f"On the rank that works longest {percent(share)} of the predicted step is {what}."
    yield "<h2>Where the step goes</h2>"
    yield f"<p>{_sentence(reading)}</p>"
    yield _figure(draw_bars(bars, title="Step time by part", reading=reading, unit="ms"))


def _pipeline(record: RunRecord) -> Iterator[str]:
    pairs = (("predicted", predicted_pipeline(record)), ("measured", measured_pipeline(record)))
    there: list[tuple[str, Timeline]] = [(name, timeline) for name, timeline in pairs if timeline is not None]
    if not there or there[0][1].schedule.pp == 1:
        return
    axis = max(timeline.total_s for _, timeline in there)
    idle = "; ".join(f"{name} {percent(timeline.bubble_of_total)} idle" for name, timeline in there)
    yield "<h2>The pipeline of one step</h2>"
    yield (
        f"<p>One row a stage, on one axis: {idle}. Measured is one step of one rank a stage; each rank's clock starts "
        "with its own step.</p>"
    )
    for name, timeline in there:
        yield _figure(draw_svg(timeline, axis), name.capitalize(), duration(timeline.total_s))


def _memory(record: RunRecord, said: Numbers) -> Iterator[str]:
    stages = said["stages"]
    if not stages:
        return
    bars = []
    for stage in stages:
        name = f"stage {stage['stage']}"
        bars.append(Bar(f"{name}, predicted", stage["predicted"], f"{stage['predicted_gib']:.2f}", faint=True))
        if stage["measured"] is not None:
            bars.append(Bar(f"{name}, measured", stage["measured"], f"{stage['measured_gib']:.2f}"))
    measured = [stage for stage in stages if stage["measured_gib"]]
    reading = "What tensors take at the fullest moment of each stage."
    if measured:
        worst = max((off(s["predicted_gib"], s["measured_gib"]) or 0.0 for s in measured), key=abs)
        reading += f" The prediction is off by at most {100 * abs(worst):.2f} %."
    else:
        reading += " Nothing was measured by stage: that takes a GPU and two steps."
    capacity = said["capacity_gib"]
    yield "<h2>Memory by stage</h2>"
    yield f"<p>{_sentence(reading)}</p>"
    limit = f"a card gives {capacity:.1f} GiB" if capacity else ""
    yield _figure(
        draw_bars(bars, title="Memory by stage", reading=reading, unit="GiB", limit=capacity, limit_name=limit)
    )
    rows = [
        (
            f"stage {stage['stage']}",
            f"{stage['predicted_gib']:.3f}",
            _gib(stage["measured_gib"]),
            _gib(stage["reserved_gib"]),
            f"{stage['used_gib']:.2f}",
            stage["at"],
        )
        for stage in stages
    ]
    names = ("", "predicted", "measured", "reserved", "predicted use of the card", "fullest moment, predicted")
    yield _table("The numbers, GiB", names, rows)


def _gib(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _curves(record: RunRecord, said: Numbers) -> Iterator[str]:
    if not record.steps:
        return
    held_out = [(one["step"], one["val_loss"]) for one in record.validation if isinstance(one.get("val_loss"), float)]
    speed, capacity = said["tokens_per_s_per_gpu"], said["capacity_gib"]
    memory = said["peak_allocated_gib"]
    # A capacity far above the curve would press it flat.
    near = capacity if capacity and memory["measured"] and memory["measured"] > 0.5 * capacity else None
    mfu = said["mfu_causal"]["predicted"]
    specs: list[dict[str, Any]] = [
        {"key": "loss", "title": "Loss", "letter": "L", "colour": "#0072b2", "also": held_out},
        {"key": "grad_norm", "title": "Gradient norm", "letter": "G", "colour": "#d55e00"},
        {"key": "tokens_per_s_per_gpu", "title": "Throughput, tokens/s/GPU", "letter": "T", "colour": "#007a5a",
         "level": speed["predicted"], "level_name": "predicted"},
        {"key": "mfu_causal", "title": "MFU, causal", "letter": "M", "colour": "#007a5a", "percent": True,
         "level": mfu, "level_name": "predicted"},
        {"key": "peak_allocated_gib", "title": "Peak memory, GiB", "letter": "A", "colour": "#0072b2",
         "level": near, "level_name": "what a card gives"},
        {"key": "lr", "title": "Learning rate", "letter": "R", "colour": "#5b636d"},
        {"key": "goodput", "title": "Goodput", "letter": "U", "colour": "#007a5a", "percent": True},
    ]  # fmt: skip
    yield "<h2>Over the steps</h2>"
    if len(record.steps) < 3:
        yield '<p class="note">So few steps are done that the curves say little yet.</p>'
    yield '<div class="curves">'
    for spec in specs:
        points = record.series(spec.pop("key"))
        if points:
            values = [value for _, value in points]
            share = spec.get("percent", False)
            shown = [
                f"{100 * value:.3g} %" if share else f"{value:.4g}" for value in (values[-1], min(values), max(values))
            ]
            reading = f"now {shown[0]}; from {shown[1]} to {shown[2]}"
            if spec.get("also"):
                reading += "; orange dots are held-out data"
            yield _figure(draw_curve(points, reading=reading, **spec), spec["title"], reading)
    yield "</div>"


def _grid(record: RunRecord) -> Iterator[str]:
    if record.forecast is None:
        return
    told = record.forecast["run"]["layout"]
    lists = {name: tuple(told.get(name, ())) for name in ("recompute", "offload", "layers")}
    layout = Layout(**{**told, **lists})
    per_node = record.forecast["gpus_per_node"]
    yield "<h2>The grid</h2>"
    stages = ", ".join(f"stage {stage}: {count}" for stage, count in enumerate(layout.layers))
    yield (
        "<p>A row a node, a cell a rank: p is its pipeline stage, d and t its place along data and tensor parallelism. "
        f"Layers of each {'virtual ' if layout.vpp > 1 else ''}stage: {escape(stages)}.</p>"
    )
    yield _figure(draw_grid(layout, per_node))


def _events(record: RunRecord) -> Iterator[str]:
    """Where the run's time went, if it kept account of it."""
    spent: dict[str, tuple[int, float]] = {}
    for event in record.events:
        count, seconds = spent.get(str(event["what"]), (0, 0.0))
        taken = event.get("seconds", 0.0)
        spent[str(event["what"])] = count + 1, seconds + (taken if isinstance(taken, int | float) else 0.0)
    if not spent:
        return
    yield "<h2>What else took time</h2>"
    rows = [(what, f"{count:,}", duration(seconds) if seconds else "–") for what, (count, seconds) in spent.items()]
    yield _plain_table(("", "times", "together"), rows)


def _sources(record: RunRecord) -> Iterator[str]:
    if record.problems:
        yield "<h2>What could not be read</h2>"
        yield f'<ul class="problems">{"".join(f"<li>{escape(problem)}</li>" for problem in record.problems)}</ul>'
    if record.forecast is None:
        yield '<p class="note">The folder has no forecast.json: nothing is known of what was predicted.</p>'
    if record.run_file:
        yield "<h2>Run file</h2>"
        yield f"<details><summary>run.yaml, every key</summary><pre>{escape(record.run_file)}</pre></details>"


def _sentence(text: str) -> str:
    """Text in which no number is parted from its unit at the end of a line."""
    for unit in ("%", "GiB", "s", "ms"):
        text = re.sub(rf"(?<=\d) (?={unit}\b|{unit}(?!\w))", "\u00a0", text)
    return escape(text)


def _figure(picture: str, name: str = "", reading: str = "") -> str:
    caption = f"<figcaption><b>{escape(name)}</b> · {escape(reading)}</figcaption>" if name else ""
    return f"<figure>{caption}{picture}</figure>"


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<details><summary>{escape(name)}</summary>{_plain_table(head, rows)}</details>"


def _plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th{_class(rows, column)}>{escape(name)}</th>" for column, name in enumerate(head))
    body = "".join(
        f"<tr>{''.join(f'<td{_class(rows, column)}>{escape(cell)}</td>' for column, cell in enumerate(row))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(rows: Sequence[Sequence[str]], column: int) -> str:
    """Columns of words start at one edge, those of numbers end at one."""
    words = any(row[column][:1].isalpha() for row in rows)
    return ' class="words"' if words else ""

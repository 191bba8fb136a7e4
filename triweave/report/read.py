"""Reads a run directory as it is: finished, still running, or with a line that was cut off."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triweave.errors import InputError, Problem
from triweave.schedule.actions import Action, Kind
from triweave.schedule.build import build_schedule
from triweave.schedule.simulate import Span, Timeline, simulate

METRICS, VALIDATION, EVENTS = "metrics.jsonl", "validation.jsonl", "timeline.jsonl"
RUN_FILE, FORECAST, MEMORY, PIPELINE = "run.yaml", "forecast.json", "memory.json", "pipeline.json"
WARM_UP = 2
"""Steps that speed is not judged by: the first compile kernels and make the optimizer's moments."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run directory holds; what it lacks is empty or None."""

    folder: Path
    steps: Sequence[Json]
    """Lines of `metrics.jsonl` in order of their steps, the last one of each."""
    validation: Sequence[Json]
    events: Sequence[Json]
    run_file: str
    forecast: Json | None
    memory: Json | None
    pipeline: Json | None
    problems: Sequence[str]
    """What could not be read, as `file:line: why`."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def settled(self) -> Sequence[Json]:
        """Steps that speed is judged by: all but the first few, or all if there are no more."""
        return self.steps[WARM_UP:] or self.steps

    def series(self, key: str) -> list[tuple[float, float]]:
        """Step and value of every line that has the key as a finite number."""
        return [(step["step"], step[key]) for step in self.steps if _is_number(step.get(key))]


def read_run(folder: Path) -> RunRecord:
    """Read what there is.

    Raises:
        InputError: no such folder, or nothing in it that a run leaves.
    """
    if not folder.is_dir():
        rule = "is a file: give the run's folder (output_dir)" if folder.exists() else "does not exist"
        raise InputError(Problem("run_dir", folder, rule))
    problems: list[str] = []
    steps = _lines(folder / METRICS, problems)
    forecast = _object(
        folder / FORECAST, problems, "run", "layout", "stages", "step", "gpus_per_node", "capacity_bytes"
    )
    if not steps and forecast is None:
        held = "is empty" if (folder / METRICS).exists() and not problems else "has no line of a step"
        rule = f"{METRICS} {held}" if (folder / METRICS).exists() else f"has no {METRICS}: no run has written here"
        raise InputError(Problem("run_dir", folder, rule))
    run_file = folder / RUN_FILE
    # A run that was resumed may have written a step twice: what it did last counts.
    return RunRecord(
        folder,
        [line for _, line in sorted({line["step"]: line for line in steps}.items())],
        _lines(folder / VALIDATION, problems),
        _lines(folder / EVENTS, problems, needs="what"),
        run_file.read_text(encoding="utf-8", errors="replace") if run_file.exists() else "",
        forecast,
        _object(folder / MEMORY, problems, "stages"),
        _object(folder / PIPELINE, problems, "schedule", "pp", "vpp", "micro_batches", "ranks"),
        problems,
    )


def measured_pipeline(record: RunRecord) -> Timeline | None:
    """What one rank of every stage did in one step; None without a trace of it."""
    told = record.pipeline
    if told is None:
        return None
    schedule = build_schedule(told["schedule"], told["pp"], told["vpp"], told["micro_batches"])
    ranks = [
        tuple(Span(Action(Kind(kind), stage, batch), start, end) for kind, stage, batch, start, end in rank)
        for rank in told["ranks"]
    ]
    # The step begins with its data; the picture with the first action.
    first = min((rank[0].start_s for rank in ranks if rank), default=0.0)
    moved = (tuple(Span(one.action, one.start_s - first, one.end_s - first) for one in rank) for rank in ranks)
    return Timeline(schedule, tuple(moved))


def predicted_pipeline(record: RunRecord) -> Timeline | None:
    """The same as it was said; None where nothing was said of time."""
    step = record.forecast["step"] if record.forecast else None
    if record.forecast is None or step is None:
        return None
    run = record.forecast["run"]
    layout = run["layout"]
    count = run["global_batch"] // (layout["dp"] * layout["micro_batch"])
    schedule = build_schedule(layout["schedule"], layout["pp"], layout["vpp"], count)
    return simulate(schedule, lambda one: step["actions_s"][one.kind.value][one.stage], step["transfer_s"])


def _lines(path: Path, problems: list[str], needs: str = "step") -> list[dict[str, Any]]:
    """Lines of JSON objects that have a number `step`; others are named and left out."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if not isinstance(value, dict) or needs not in value or not _is_number(value.get("step")):
                raise ValueError(f"no {needs}")
            found.append(value)
        except ValueError as error:
            why = "cut off or damaged" if isinstance(error, json.JSONDecodeError) else f"says of {error}"
            problems.append(f"{path.name}:{number}: {why}, left out")
    return found


def _object(path: Path, problems: list[str], *keys: str) -> dict[str, Any] | None:
    """A file of one JSON object that has `keys`; any other is named and left out."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict) or not set(keys) <= set(value):
        problems.append(f"{path.name}: damaged or of another version, left out")
        return None
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

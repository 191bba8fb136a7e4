"""Where a run's time went, over all its starts: `RUN_DIR/timeline.jsonl`, and what it adds up to.

Goodput is the share of the time since the first start that went into steps that count: a step that was done again after
a restart counts once, and of a step that took more than twice the median of those before it only what the median takes.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

FILE = "timeline.jsonl"

SLOW = 2.0
"""A step that takes more than so many medians has stood still for what goes beyond one."""

WINDOW, LEAST = 64, 4
"""Steps that the median is taken of, at most and at least."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was over at a moment of the wall clock."""

    at: float
    """Seconds since the epoch."""
    what: str
    """`start` (at: when the process began), `restore`, `step`, `save`, `validation`, `export`, `end`."""
    step: int
    """Steps done by then."""
    seconds: float = 0.0
    """How long it took."""


CLASSES = (
    *("new steps", "start", "restore", "save", "validation", "export"),
    *("lost steps", "stalls", "stopped", "other"),
)
"""What time goes into. `lost steps` were done again; `stopped` passed between the end of a start and the next."""


class Ledger:
    """Adds events up, one after the other; the classes sum to the time from the first start to the last event."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CLASSES, 0.0)
        self.step_s: deque[float] = deque(maxlen=WINDOW)
        self.save_s: deque[float] = deque(maxlen=WINDOW)
        self._saves: deque[int] = deque(maxlen=8)
        """Steps of the last saves: nobody goes back to an earlier one."""
        self._counted: dict[int, float] = {}
        """Seconds of the steps that a restart may still do again."""
        self._last: Event | None = None

    def take(self, event: Event) -> None:
        """Take the next event."""
        last, self._last = self._last, event
        if last is None:
            return
        between = max(0.0, event.at - last.at)
        if event.what == "start":
            self.seconds["stopped"] += between
            return
        taken = min(event.seconds, between)
        self.seconds["start" if last.what in ("start", "restore") else "other"] += between - taken
        if event.what == "step":
            self._take_step(event.step, taken)
            return
        self.seconds[event.what if event.what in self.seconds else "other"] += taken
        if event.what == "save":
            self.save_s.append(event.seconds)
            self._saves.append(event.step)
            self._counted = {step: s for step, s in self._counted.items() if step > self._saves[0]}

    def _take_step(self, step: int, taken: float) -> None:
        typical = self.typical_step_s
        stalled = taken - typical if len(self.step_s) >= LEAST and taken > SLOW * typical else 0.0
        lost = self._counted.get(step, 0.0)
        self.seconds["stalls"] += stalled
        self.seconds["lost steps"] += lost
        self.seconds["new steps"] += taken - stalled - lost
        self._counted[step] = taken - stalled
        self.step_s.append(taken)

    @property
    def typical_step_s(self) -> float:
        """Median seconds of the last steps; 0 before there is one."""
        return statistics.median(self.step_s) if self.step_s else 0.0

    @property
    def goodput(self) -> float:
        """Share of the time since the first start that went into steps that count."""
        everything = sum(self.seconds.values())
        return self.seconds["new steps"] / everything if everything > 0 else 0.0

    def summary(self) -> str:
        """Goodput and the rest, largest first, as one line."""
        everything = sum(self.seconds.values()) or 1.0
        rest = sorted(((spent, name) for name, spent in self.seconds.items() if name != "new steps"), reverse=True)
        spelled = ", ".join(f"{name} {100 * spent / everything:.1f} %" for spent, name in rest if spent > 0)
        return f"{100 * self.goodput:.1f} % of the time on new steps; {spelled}"

    def recommend(self, hours_between_failures: float) -> str:
        """How often to save, from what a save and a step took here; empty before there was either."""
        step_s = self.typical_step_s
        if not self.save_s or step_s <= 0:
            return ""
        stall_s = statistics.median(self.save_s)
        interval_s = max(best_interval_s(stall_s, hours_between_failures), step_s)
        cost = stall_s / interval_s + interval_s / 2 / (hours_between_failures * 3600)
        return (
            f"checkpoint.every_steps {max(1, round(interval_s / step_s))} loses least ({100 * cost:.2f} % of the time):"
            f" a save stalls {stall_s:.2f} s, and a failure is expected every {hours_between_failures:g} h"
        )


class Timeline:
    """The events of a run directory, on disk and added up; without a folder, of this process alone."""

    def __init__(self, folder: Path | None) -> None:
        """Go on with the folder's timeline; None writes nothing."""
        self.ledger = Ledger()
        self._path = None if folder is None else folder / FILE
        if self._path is not None:
            events = read_events(self._path)
            for event in events:
                self.ledger.take(event)
            # A line that was cut off in being written must not swallow the next one.
            self._path.write_text("".join(_line(event) for event in events), encoding="utf-8")

    def add(self, what: str, step: int, seconds: float = 0.0, at: float | None = None) -> None:
        """Note what has just ended (`start`: what has begun at `at`)."""
        event = Event(time.time() if at is None else at, what, step, seconds)
        self.ledger.take(event)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(event))


def read_events(path: Path) -> list[Event]:
    """The whole lines of a timeline."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(Event(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def best_interval_s(stall_s: float, hours_between_failures: float) -> float:
    """Seconds between saves that lose least: the square root of 2 x stall x time between failures.

    Young, Communications of the ACM 17 (1974) 530; Daly, Future Generation Computer Systems 22 (2006) 303 shows that it
    is near the optimum as long as the stall is small against the time between failures.
    """
    return math.sqrt(2 * stall_s * hours_between_failures * 3600)


def _line(event: Event) -> str:
    values = {"at": round(event.at, 3), "what": event.what, "step": event.step, "seconds": round(event.seconds, 4)}
    return json.dumps(values) + "\n"

"""How long each action of a step takes, on the GPU's own clock."""

from __future__ import annotations

import time

import torch

from triweave.schedule.actions import Action


class Clock:
    """Marks the beginning of every action; nothing waits until the step is over."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.at = ""
        """What the rank is at, for the message of an error."""
        self._marks: list[tuple[Action | None, torch.cuda.Event | float]] = []

    def mark(self, action: Action | None) -> None:
        """An action begins; None: the last one is over."""
        self.at = "after the pipeline" if action is None else str(action)
        self._marks.append((action, self._now()))

    def start(self) -> None:
        """A step begins."""
        self.at = "before the pipeline"
        self._marks = [(None, self._now())]

    def stop(self) -> tuple[float, list[tuple[Action, float]]]:
        """Seconds of the whole step, and of each of its actions in order."""
        end = self._now()
        if self.cuda:
            torch.cuda.synchronize()
        actions = [
            (action, _between(begin, following))
            for (action, begin), (_, following) in zip(self._marks, self._marks[1:], strict=False)
            if action is not None
        ]
        return _between(self._marks[0][1], end), actions

    def _now(self) -> torch.cuda.Event | float:
        if not self.cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    return float(begin.elapsed_time(end)) / 1e3

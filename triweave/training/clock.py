"""When each action of a step begins and ends, on the GPU's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from triweave.pipeline import Pipeline
from triweave.schedule.actions import Action
from triweave.schedule.simulate import Span

_Moment = float | torch.cuda.Event


class Clock:
    """Marks actions while a pipeline runs them; nothing waits until the step is over."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.at = ""
        """What the rank is at, for the message of an error."""
        self._start: _Moment = 0.0
        self._begins: list[tuple[Action, _Moment]] = []
        self._ends: list[_Moment] = []

    def follow(self, pipeline: Pipeline) -> Callable[[], None]:
        """Be told of every action of `pipeline`, as well as who is told already; returns what ends that."""
        before, after = pipeline.before_action, pipeline.after_action

        def both_before(action: Action | None) -> None:
            before(action)
            self._before(action)

        def both_after(action: Action) -> None:
            self._after(action)
            after(action)

        pipeline.before_action, pipeline.after_action = both_before, both_after

        def leave() -> None:
            pipeline.before_action, pipeline.after_action = before, after

        return leave

    def start(self) -> None:
        """A step begins."""
        self.at = "before the pipeline"
        self._begins, self._ends = [], []
        self._start = self._now()

    def stop(self) -> tuple[float, tuple[Span, ...]]:
        """Seconds of the whole step, and its actions in order, in seconds from its start."""
        end = self._now()
        if self.cuda:
            torch.cuda.synchronize()
        return _between(self._start, end), tuple(self._spans())

    def _spans(self) -> Iterator[Span]:
        for (action, begin), end in zip(self._begins, self._ends, strict=True):
            start_s = _between(self._start, begin)
            yield Span(action, start_s, start_s + _between(begin, end))

    def _before(self, action: Action | None) -> None:
        """An action begins, what it receives is there; None: the last one is over."""
        self.at = "after the pipeline" if action is None else str(action)
        if action is not None:
            self._begins.append((action, self._now()))

    def _after(self, action: Action) -> None:
        self._ends.append(self._now())

    def _now(self) -> _Moment:
        if not self.cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: _Moment, end: _Moment) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    return float(begin.elapsed_time(end)) / 1e3

"""A stop signal at any moment, to any rank or the launcher: all ranks stop at one step, saved, with one exit code."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fault_cases.kills import newest
from fault_cases.rows import Row
from fault_cases.workshop import Plant, course, make_files, make_run, note_when, start

import triweave.training.loop as loop
from triweave.recovery.stop import STOPPED
from triweave.recovery.watch import Watch
from triweave.training.process import Process

NUM_STEPS = 6


@dataclass(frozen=True, slots=True)
class Stop:
    """A moment, a signal, and who gets it."""

    moment: str
    name: str
    to: str
    """`launcher`, `one rank`, or `all` of them and the launcher, as a scheduler does it."""


MOMENTS = ("starting", "reading", "in an action", "blocked in a collective", "saving", "validating")


def send(stop: Stop, launcher: int, folder: Path) -> None:
    """Send the signal to whom it goes, once."""
    sent = folder / "sent"
    if sent.exists():
        return
    sent.touch()
    note_when(folder)
    number = getattr(signal, stop.name)
    if stop.to in ("launcher", "all"):
        os.kill(launcher, number)
    if stop.to in ("one rank", "all"):
        os.kill(os.getpid(), number)
    if stop.to == "all":
        for other in folder.glob("pid-*"):
            os.kill(int(other.read_text()), number)


def plant(stop: Stop, launcher: int, folder: Path, process: Process) -> None:
    """Let rank 1 send the signal at its moment."""
    (folder / f"pid-{process.rank}").write_text(str(os.getpid()))
    if process.rank != 1:
        return
    now = partial(send, stop, launcher, folder)
    if stop.moment == "saving":
        real = os.fsync

        def fsync(descriptor: int) -> None:
            now()
            real(descriptor)

        os.fsync = fsync
    elif stop.moment == "validating":
        loop.evaluate_step = after(now, loop.evaluate_step)
    elif stop.moment == "starting":
        loop.build_engine = after(now, loop.build_engine)
    elif stop.moment == "reading":
        loop.training_batch = after(now, loop.training_batch)
    else:
        in_an_action(now, sleeps_s=1.0 if stop.moment == "blocked in a collective" else 0.0)


def after(now: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, and before it the signal."""

    def call(*args: Any, **keys: Any) -> Any:
        now()
        return real(*args, **keys)

    return call


def in_an_action(now: Callable[[], None], sleeps_s: float) -> None:
    """The signal in an action of step 3; then the other ranks wait in a collective for a while."""
    real = Watch.mark

    def mark(self: Watch, action: Any) -> None:
        real(self, action)
        if self.step == 3 and action is not None:
            now()
            time.sleep(sleeps_s / 4)

    Watch.mark = mark  # type: ignore[method-assign]


def stopped_at(folder: Path) -> int | None:
    """The step of the note that a stopped run leaves behind."""
    note = folder / "stopped.json"
    found = re.search(r'"step": (\d+)', note.read_text()) if note.exists() else None
    return int(found[1]) if found else None


def run(quick: bool, out: Path) -> list[Row]:
    """Stop runs at every moment, by either signal, at every address; then let them go on."""
    make_files(out, quick=quick)
    keys: dict[str, Any] = {"layout.dp": 2, "train.steps": NUM_STEPS, "data.validation": "0.2"}
    reference, prepared = make_run(out, "reference", keys)
    start(reference, prepared)
    expected = course(Path(reference.run.output_dir))
    rows = []
    for moment in MOMENTS[4:] if quick else MOMENTS:
        stops = [Stop(moment, name, to) for name in ("SIGTERM", "SIGUSR1") for to in ("launcher", "one rank", "all")]
        wrong: list[str] = []
        slowest_s = 0.0
        for stop in stops[:1] if quick else stops:
            resolved, prepared = make_run(out, "stopped", keys)
            output = Path(resolved.run.output_dir)
            planted: Plant = partial(plant, stop, os.getpid())
            outcome = start(resolved, prepared, planted)
            slowest_s = max(slowest_s, outcome.ended_after_s)
            at = stopped_at(output)
            if outcome.code != STOPPED or at is None or at != newest(output):
                said = outcome.said.strip()[:400]
                wrong.append(
                    f"{stop.name} to {stop.to}: code {outcome.code}, note {at}, saved {newest(output)}: {said}"
                )
            again = start(resolved, prepared)
            if again.code or course(output) != expected or stopped_at(output) is not None:
                wrong.append(f"{stop.name} to {stop.to}: did not go on as the run never stopped: {again.said[:300]}")
            shutil.rmtree(output)
        tried = 1 if quick else len(stops)
        detail = f"exit code {STOPPED}, gone at most {slowest_s:.1f} s after the signal; {'; '.join(wrong)}"
        rows.append(Row(f"stop signal: {moment}", tried, max(0, tried - len(wrong)), detail))
    return rows

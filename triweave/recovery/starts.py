"""The starts of a run and what each ended with: `RUN_DIR/starts.jsonl`. A storm of restarts ends by itself.

Who starts a run again (torchrun, Slurm, Kubernetes, a person's loop) sees an exit code and not whether the run gets on.
The run folder does: a start that finds so many before it without a new step refuses to be one more. A start is
written down before it can fail; how it ended is added by whoever is left to say it, and a start without an end was
killed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from triweave.errors import GivenUp
from triweave.recovery.goodput import FILE as TIMELINE_FILE
from triweave.recovery.goodput import read_events

FILE = "starts.jsonl"

DONE, STOPPED, INTERRUPTED, FAILED, LOST_A_PEER = "done", "stopped", "interrupted", "failed", "lost a peer"
"""How a start ends: well, on request, by a person's Ctrl-C, by an error, by an error because another rank is gone."""

MOST_CHARACTERS = 2000
"""Of a message that are kept: its beginning, which says what, and its end, where a traceback says why."""

SHOWN_CHARACTERS = 240
"""Of a message in the list of all starts."""


@dataclass(frozen=True, slots=True)
class End:
    """What somebody says of the end of a start."""

    how: str
    said: str
    rank: int | None
    """Of who says it; None for the process that started the ranks, which has heard all of them."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start, and what is known of its end."""

    at: float
    """Seconds since the epoch."""
    host: str
    pid: int
    """Of rank 0."""
    run: str
    """Digest of everything that ranks must agree on: another one is another attempt, after a change."""
    saved: int
    """Step of the newest checkpoint when it began."""
    done: int
    """The furthest step that any start before it has done."""
    ends: tuple[End, ...] = ()

    @property
    def end(self) -> End | None:
        """What ended it: the starting process's word before that of ranks, a cause before its consequences."""
        by_weight = sorted(self.ends, key=lambda one: (one.how == LOST_A_PEER, one.rank is not None))
        return by_weight[0] if by_weight else None

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.at, UTC).isoformat(timespec="seconds")
        return f"{when} on {self.host}, from step {self.saved}: {_reason(self.end)}"


def begin(folder: Path, run: str, saved: int, most: int) -> None:
    """Write a start down, or refuse it.

    Args:
        folder: of the run; its lock is held.
        run: digest of all that ranks must agree on.
        saved: step of the newest checkpoint, 0 without one.
        most: starts in a row without a new step; 0 for no limit.

    Raises:
        GivenUp: there were so many; the message says what each of them ended with.
    """
    done = max((event.step for event in read_events(folder / TIMELINE_FILE) if event.what == "step"), default=0)
    now = Start(time.time(), socket.gethostname(), os.getpid(), run, saved, done)
    vain = in_vain(read_starts(folder / FILE), now)
    if most and len(vain) >= most:
        raise GivenUp(
            "\n".join(
                [
                    f"{folder}: {len(vain)} starts in a row came to no new step, and"
                    f" runtime.max_starts_without_step = {most}: this run is not started again",
                    *(f"  {one}" for one in vain[-most:]),
                    f"  to go on: take the cause away and change the run file, or remove {folder / FILE}",
                ]
            )
        )
    line = {"what": "start", "at": round(now.at, 3), "host": now.host, "pid": now.pid, "run": run}
    _append(folder, {**line, "saved": saved, "done": done})


def note_end(folder: Path, how: str, said: str = "", rank: int | None = None) -> None:
    """Add what is known of the end of the start that was written down last.

    A folder that takes no line is no reason to fail in another way than the one that is to be told.
    """
    half = MOST_CHARACTERS // 2
    short = said if len(said) <= MOST_CHARACTERS else f"{said[:half]}\n...\n{said[-half:]}"
    try:
        _append(folder, {"what": "end", "how": how, "said": short, "rank": rank})
    except OSError:
        return


def note_end_of(pids: Sequence[int], folder: Path, how: str, said: str) -> None:
    """`note_end` by the process that started the ranks, if the last start is that of one of these ranks.

    It is not where their rank 0 was refused, say because another job holds the folder.
    """
    starts = read_starts(folder / FILE)
    if starts and starts[-1].host == socket.gethostname() and starts[-1].pid in pids:
        note_end(folder, how, said)


def in_vain(starts: Sequence[Start], now: Start) -> list[Start]:
    """The starts right before `now` that came to no new step, oldest first.

    A start came to one if the next found a newer checkpoint or a further step. It does not count if a person ended it;
    what was before a good end, or before a change of the run, is forgotten.
    """
    found: list[Start] = []
    after = now
    for start in reversed(starts):
        end = start.end
        is_good = end is not None and end.how == DONE
        if start.run != now.run or is_good or after.saved > start.saved or after.done > start.done:
            break
        if end is None or end.how != INTERRUPTED:
            found.insert(0, start)
        after = start
    return found


def read_starts(path: Path) -> list[Start]:
    """The starts of a run, oldest first; lines that cannot be read are left out."""
    starts: list[Start] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            what = values.pop("what")
            if what == "start":
                starts.append(Start(**values))
            elif starts:
                starts[-1] = replace(starts[-1], ends=(*starts[-1].ends, End(**values)))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return starts


def _reason(end: End | None) -> str:
    """What ended a start, in one line: the first of its message, and of a traceback also the last."""
    if end is None:
        return "ended without a word: killed, or its host is gone"
    lines = [line for line in end.said.splitlines() if line.strip()] or [end.how]
    words = lines[0]
    if "Traceback" in end.said:
        words = lines[-1] if words.startswith("Traceback") else f"{words}: {lines[-1]}"
    who = f"rank {end.rank}: " if end.rank is not None and not words.startswith("rank ") else ""
    return f"{who}{words}"[:SHOWN_CHARACTERS]


def _append(folder: Path, values: dict[str, object]) -> None:
    # One write at the end of the file: ranks of a host add theirs at the same time. A line that was cut off in being
    # written must not swallow this one.
    handle = os.open(folder / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(handle).st_size
        broken = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, (b"\n" if broken else b"") + json.dumps(values).encode() + b"\n")
    finally:
        os.close(handle)

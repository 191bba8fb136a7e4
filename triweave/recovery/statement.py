"""What a rank says of itself when the ranks have to find out which of them hangs."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

SHOWN_FRAMES = 6
"""Innermost frames of the main thread that are told."""

_WAITING = (".wait(", ".item()", ".tolist()", ".cpu()", "synchronize(", "run_backward(", "float(total)", "barrier(")
"""What stands in a line that waits for other ranks, or for the GPU, which may."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective of a rank on one of its groups."""

    sequence: int
    """Number of it on the group, from 1."""
    name: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_done: bool

    def __str__(self) -> str:
        what = ", ".join(f"{dtype} {list(size)}" for dtype, size in zip(self.dtypes, self.sizes, strict=False))
        return f"{self.name} {self.sequence} ({what}){' done' if self.is_done else ''}"


@dataclass(frozen=True, slots=True)
class Statement:
    """Where a rank is."""

    rank: int
    progress: int
    """Marks that it has passed; ranks of one stage pass the same."""
    where: str
    """In words: step, section, schedule action."""
    waits: bool
    """Whether its main thread waits for other ranks or for the GPU."""
    stack: tuple[str, ...]
    """Innermost frames of its main thread, outermost first."""
    collectives: Mapping[str, Collective]
    """The last one of each process group, by the group's name, which is the same on all ranks."""

    def to_json(self) -> str:
        """As text, for the store: nothing that comes from there is ever unpickled."""
        return json.dumps(asdict(self))


def from_json(text: str) -> Statement:
    """What `Statement.to_json` wrote."""
    values = json.loads(text)
    collectives = {
        group: Collective(**{**one, "sizes": tuple(map(tuple, one["sizes"])), "dtypes": tuple(one["dtypes"])})
        for group, one in values["collectives"].items()
    }
    return Statement(**{**values, "stack": tuple(values["stack"]), "collectives": collectives})


def state_now(rank: int, progress: int, where: str) -> Statement:
    """What this process can say; called on another thread than the main one."""
    frames = _stack_of(threading.main_thread())
    if frames and frames[-1].filename.endswith("/threading.py"):
        # It waits for another thread of this process: what that one does is to be told.
        frames = [*frames, *(one for thread in threading.enumerate() if _works(thread) for one in _stack_of(thread))]
    stack = tuple(f"{_short(one.filename)}:{one.lineno} {one.name}: {one.line}" for one in frames[-SHOWN_FRAMES:])
    waits = bool(frames) and ("/torch/distributed/" in frames[-1].filename or _waits(frames[-1].line or ""))
    return Statement(rank, progress, where, waits, stack, last_collectives())


def _stack_of(thread: threading.Thread) -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(thread.ident or 0)
    return [] if frame is None else list(traceback.extract_stack(frame))


def _works(thread: threading.Thread) -> bool:
    """Whether it is a thread that the main thread may wait for: the one that saves."""
    return thread.name.startswith("saver")


def last_collectives() -> dict[str, Collective]:
    """The last collective on every group of this process, as torch's flight recorder has it."""
    return {group: found[-1] for group, found in recorded_collectives().items()}


def recorded_collectives() -> dict[str, list[Collective]]:
    """What torch's flight recorders still have of every group, oldest first; of messages between two they have nothing.

    NCCL's collectives stand in a recorder of their own. One that tells of a group again what the first has told (torch
    may join them) is not asked about it. Their Python names are private (torch 2.11 to 2.13); without them a verdict
    rests on stacks and positions alone.
    """
    found: dict[str, list[Collective]] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", []) if dump else []
        told: dict[str, list[Collective]] = {}
        for entry in entries:
            if not entry.get("is_p2p"):
                told.setdefault(_group_of(entry), []).append(_collective(entry))
        found = told | found
    return found


def _group_of(entry: Mapping[str, Any]) -> str:
    """Name of a group and, since a group may have several and each counts for itself, of what carries it out."""
    backend = str(entry["profiling_name"]).rpartition(":")[0]
    return " ".join([*map(str, entry["process_group"]), *([f"({backend})"] if backend else [])])


def _collective(entry: Mapping[str, Any]) -> Collective:
    return Collective(
        sequence=int(entry["collective_seq_id"]),
        name=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        sizes=tuple(tuple(size) for size in entry.get("input_sizes", [])),
        dtypes=tuple(entry.get("input_dtypes", [])),
        is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
    )


def _waits(line: str) -> bool:
    return any(word in line for word in _WAITING)


def _short(path: str) -> str:
    """The end of a path that says where in a package a file is."""
    for mark in ("/site-packages/", "/triweave/"):
        if mark in path:
            return (mark.strip("/") + "/" if mark == "/triweave/" else "") + path.rpartition(mark)[2]
    return path.rpartition("/")[2]

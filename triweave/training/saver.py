"""Saves a run's checkpoints, beside training where there is room: a step waits for a copy, not for the disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from triweave.checkpoint.agreement import gather
from triweave.checkpoint.host_copy import HostCopy, host_key
from triweave.checkpoint.kept import name_of, retire
from triweave.checkpoint.owner import Owner
from triweave.checkpoint.store import Store
from triweave.errors import RunFailed
from triweave.groups import Group, Groups
from triweave.host_room import host_room
from triweave.training.checkpoints import Snapshot, snapshot_bytes, take_snapshot, write_snapshot
from triweave.training.engine import Engine
from triweave.training.host_need import Host, hosts_of, no_room_for_copies
from triweave.training.run_progress import RunProgress

SAVE_TIMEOUT_S = 3600.0
"""In which the slowest rank must have written its part: 31 GB at 10 MB/s."""


@dataclass(frozen=True, slots=True)
class Saved:
    """How a save went; the same on all ranks but for the times."""

    name: str
    problem: str | None
    """Why it failed, None if it did not."""
    remark: str | None
    """What else there is to say: an old checkpoint that would not go."""
    stall_s: float
    """Seconds that training waited."""
    total_s: float
    """Seconds until it was on the disk."""

    @property
    def lines(self) -> list[str]:
        """For the log."""
        if self.problem is not None:
            return [f"NOT SAVED {self.problem}; the checkpoints before it are untouched"]
        times = f"training waited {self.stall_s:.2f} s, on the disk after {self.total_s:.2f} s"
        return [f"saved     {self.name}: {times}", *([self.remark] if self.remark is not None else [])]


class Saver:
    """Writes the checkpoints of a run. At most one save is under way, and how it went is always asked.

    All ranks call every method together. A save that fails changes nothing and ends nothing: it is counted and told.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        keep: int,
        asynchronous: Literal["auto", "off"] = "off",
        owner: Owner | None = None,
        offload_bytes: int = 0,
    ) -> None:
        """Ask all ranks whether there is room for copies of their states, and make it.

        Args:
            store: where the checkpoints of this run lie.
            engine: what is saved.
            keep: how many.
            asynchronous: `auto` writes beside training if all hosts have room for the copies.
            owner: the run that the checkpoints name, on rank 0.
            offload_bytes: what this rank's layers will keep in the same memory.
        """
        self.failed = 0
        """Saves that failed."""
        self.unsaved: str | None = None
        """Why the last save failed, None if it did not."""
        self.bad: set[str] = set()
        """Checkpoints that were found damaged: they do not count as kept."""
        self._store, self._engine, self._keep, self._owner = store, engine, keep, owner
        self.group = saving_group(engine.groups)
        sizes = snapshot_bytes(engine) if asynchronous == "auto" else []
        self.hosts = _ask_hosts(sum(sizes), offload_bytes, self.group)
        """What their ranks want to take of their memory, before any was taken."""
        self._without = no_room_for_copies(self.hosts) if sizes else None
        self._copy = _make_copy(sizes, engine, self.group) if sizes and self._without is None else None
        self._thread = ThreadPoolExecutor(1, "saver") if self._copy is not None else None
        self._under_way: Future[Saved] | None = None
        self._news: list[Saved] = []

    @property
    def method(self) -> str:
        """For the log: what a save will do."""
        if self._copy is None:
            return "training waits for the disk" + (f": {self._without}" if self._without is not None else "")
        return f"beside training, from a copy of {self._copy.num_bytes / 2**30:.2f} GiB a rank in host memory"

    def save(self, progress: RunProgress, run_file: str) -> None:
        """Save the state as it is now; returns as soon as training may change it.

        Waits for the save before, if that is still under way.
        """
        self._settle()
        begin = time.monotonic()
        snapshot = take_snapshot(self._engine, progress, run_file, self._copy)
        if self._thread is None:
            self._note(self._write(snapshot, begin, None))
        else:
            self._under_way = self._thread.submit(self._write, snapshot, begin, time.monotonic() - begin)

    def news(self) -> list[Saved]:
        """Saves that have ended since this was asked last."""
        if self._under_way is not None and self._under_way.done():
            self._settle()
        news, self._news = self._news, []
        return news

    def finish(self) -> None:
        """Wait for the save that is under way, and give the memory back. No save can follow."""
        self._settle()
        if self._thread is not None:
            self._thread.shutdown()
        if self._copy is not None:
            self._copy.close()

    def _settle(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self._note(under_way.result())

    def _note(self, saved: Saved) -> None:
        self.failed += saved.problem is not None
        self.unsaved = saved.problem
        self._news.append(saved)

    def _write(self, snapshot: Snapshot, begin: float, stall_s: float | None) -> Saved:
        """Write and clean up; whatever happens comes back as an answer, for nobody sees what a thread raises."""
        name = name_of(snapshot.progress.step)
        problem = remark = None
        try:
            write_snapshot(self._store, snapshot, self.group, self._owner)
        except RunFailed as error:
            problem = str(error)
        # A peer that is gone, a thread that cannot start: nothing that a save meets may end training by itself.
        except Exception as error:
            problem = f"cannot save {self._store.where}/{name}: {type(error).__name__}: {error}"
        else:
            self.bad.discard(name)
            if self.group.rank == 0:
                remark = self._clean_up(name)
        total_s = time.monotonic() - begin
        return Saved(name, problem, remark, total_s if stall_s is None else stall_s, total_s)

    def _clean_up(self, name: str) -> str | None:
        """Note the newest and delete the oldest: the new one is there already, whatever becomes of this."""
        try:
            self._store.give_hint(name)
            retire(self._store, self._keep, self.bad)
        except OSError as error:
            return f"{self._store.where} has {name}, but cannot be tidied: {error.strerror or error}"
        return None


def saving_group(groups: Groups) -> Group:
    """All ranks once more, over gloo and for saving alone.

    On a group that training uses too, its collectives and those of a save would meet out of order and wait for ever.
    """
    world = groups.world
    if world.size == 1:
        return world
    handle = dist.new_group(list(world.ranks), timeout=timedelta(seconds=SAVE_TIMEOUT_S), backend="gloo")
    return Group(world.ranks, world.rank, handle)


def _ask_hosts(copies_bytes: int, offload_bytes: int, group: Group) -> list[Host]:
    """What the ranks of each host want; all ranks get the same."""
    available = host_room().available_bytes
    return hosts_of(gather((host_key(), copies_bytes, offload_bytes, available), group))


def _make_copy(sizes: Sequence[int], engine: Engine, group: Group) -> HostCopy | None:
    """Room for a copy of this rank's state; None on all ranks if one cannot have it."""
    copy = None
    # What was asked beforehand may not be so any more.
    with suppress(RuntimeError, MemoryError):
        copy = HostCopy(sizes, engine.groups.device)
    if not all(gather(copy is not None, group)):
        if copy is not None:
            copy.close()
        return None
    return copy

"""The watch over a run: one message when it hangs, from a thread that needs neither the main thread nor the network.

Every rank's main thread counts marks: at each section of the loop and each action of the schedule. That is all that a
step pays. When a rank's count has not moved for too long, a thread of its own asks the others, through the store, where
they are; the first that asks says what came of it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from triweave.recovery.statement import Statement, from_json, state_now
from triweave.recovery.verdict import describe, describe_alone, judge

BEAT_S = 0.25
"""Between two looks at the count."""

ANSWER_S = 1.0
"""In which the others must say where they are."""

ALONE_S = 1.5
"""After a rank's limit, in which the ranks must have come to a verdict together."""

SUSPENDED_S = 2.0
"""A look that comes so late means that the whole process was stopped for a while (a suspended job)."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> object:
        """Put a value."""

    def get(self, key: str, /) -> bytes:
        """Take a value that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Count, and return the count."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""


class Watch:
    """One rank's part of the watch."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        leave: Callable[[str], None],
        *,
        step_limit_s: float,
        other_limit_s: float,
        rank_0_keeps_store: bool = False,
    ) -> None:
        """Take what a rank knows of the run.

        Args:
            rank: of this process.
            world_size: ranks of the run.
            store: where they meet; a connection of the watch's own. None for a single process.
            leave: ends this process, with a message or without a word.
            step_limit_s: seconds without progress that are too many in a step or a validation.
            other_limit_s: the same in a start, a load, a save and an export.
            rank_0_keeps_store: whether no launcher does.
        """
        self.rank, self.world_size, self.store, self.leave = rank, world_size, store, leave
        self.step_limit_s, self.other_limit_s = step_limit_s, other_limit_s
        self.rank_0_keeps_store = rank_0_keeps_store
        self.count = 0
        self.section = "starting"
        self.step = 0
        self.doing: object = None
        self._limit_s = other_limit_s
        self._seen, self._since = -1, time.monotonic()
        self._answered = False
        self._heard = time.monotonic()
        """When the store last answered."""
        self._over = threading.Event()
        self.keeper: str | None = None
        """Host and process id of the rank that keeps the store, on the others."""

    # --- the main thread --------------------------------------------------------------------------------------

    def enter(self, section: str, step: int, *, in_step: bool = True) -> None:
        """Say that the main thread begins something."""
        self.section, self.step, self.doing = section, step, None
        self._limit_s = self.step_limit_s if in_step else self.other_limit_s
        self.count += 1

    def mark(self, action: object) -> None:
        """Say that the main thread begins an action of the schedule, or (None) what follows the last one."""
        self.doing = action
        self.count += 1

    def where(self) -> str:
        """Where the main thread is, in words."""
        action = f", {_spell(self.doing)}" if self.doing is not None else ""
        return f"step {self.step}, {self.section}{action}"

    # --- the threads ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Look at the count until the watch is over; ask the other ranks when it stands still."""
        while not self._pause():
            try:
                if self._stalled_s() > self._limit_s:
                    self._inquire()
                if self.store is not None:
                    asked = self.store.check([_ASKED])
                    self._heard = time.monotonic()
                    if asked and not self._answered:
                        self._answer(self.store)
            except RuntimeError:
                return  # the store is gone: `guard` goes on without it

    def guard(self) -> None:
        """See that `run` itself is not held up: by a store whose keeper is gone, or by the interpreter."""
        while not self._pause():
            # Needs no interpreter: says where the main thread is even if a call into C never lets go of it.
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback_later(self._limit_s + ANSWER_S, exit=False, file=sys.__stderr__)
            # Rank 1 may speak, for the store may have gone with rank 0; the others wait for it to end them.
            late_s = ALONE_S + (0.0 if self.rank <= 1 else ANSWER_S)
            if self._stalled_s() > self._limit_s + late_s and time.monotonic() - self._heard > ANSWER_S:
                keeper = "rank 0" if self.rank_0_keeps_store else "the launcher"
                said = describe_alone(self._state_now(), keeper, self._stalled_s())
                if self.keeper is not None and _is_stopped(self.keeper):
                    _kill(self.keeper)
                self.leave(said if self.rank <= 1 else "")
        faulthandler.cancel_dump_traceback_later()

    def _pause(self) -> bool:
        """Wait a beat; returns whether the watch is over. Nobody hangs because the whole process was suspended."""
        before = time.monotonic()
        is_over = self._over.wait(BEAT_S)
        if time.monotonic() - before > SUSPENDED_S:
            self._since = time.monotonic()
        return is_over

    def end(self) -> None:
        """End the watch: the run is over."""
        self._over.set()

    def _stalled_s(self) -> float:
        """Seconds since the count was last seen to move."""
        if self.count != self._seen:
            self._seen, self._since = self.count, time.monotonic()
        return time.monotonic() - self._since

    def _state_now(self) -> Statement:
        return state_now(self.rank, self.count, self.where())

    def _answer(self, store: Store) -> None:
        """Tell the rank that asked where this one is."""
        self._answered = True
        store.set(_says(self.rank), self._state_now().to_json())

    def _inquire(self) -> None:
        """Ask all ranks where they are and tell what comes of it, unless another rank has asked first."""
        store, waited_s = self.store, self._stalled_s()
        if store is None:
            mine = {self.rank: self._state_now()}
            return self.leave(describe(judge(mine, 1), mine, waited_s))
        asked_first = store.add(_ASKED, 1) == 1
        self._answer(store)
        if not asked_first:
            self._heard = time.monotonic() + ANSWER_S
            self._over.wait(2 * ANSWER_S)
            return self.leave("")
        said = self._collect(store)
        verdict = judge(said, self.world_size)
        self._end_silent(store, [rank for rank in verdict.guilty if rank not in said])
        return self.leave(describe(verdict, said, waited_s))

    def _collect(self, store: Store) -> dict[int, Statement]:
        """What the ranks say, for as long as they are given."""
        said: dict[int, Statement] = {}
        self._heard = time.monotonic()
        deadline = time.monotonic() + ANSWER_S
        while len(said) < self.world_size and time.monotonic() < deadline:
            for rank in range(self.world_size):
                if rank not in said and store.check([_says(rank)]):
                    said[rank] = from_json(store.get(_says(rank)).decode())
            self._heard = time.monotonic()
            time.sleep(BEAT_S / 5)
        return said

    def _end_silent(self, store: Store, silent: list[int]) -> None:
        """Kill ranks of this host that do not answer: a stopped process hears no other signal."""
        for rank in silent:
            if store.check([_process(rank)]):
                _kill(store.get(_process(rank)).decode())


@contextmanager
def watching(watch: Watch) -> Iterator[Watch]:
    """Watch for as long as the block lasts. After an error the process ends, and the watch with it."""
    if watch.store is not None:
        watch.store.set(_process(watch.rank), f"{socket.gethostname()} {os.getpid()}")
        if watch.rank_0_keeps_store and watch.rank != 0:
            watch.keeper = watch.store.get(_process(0)).decode()
    threads = [threading.Thread(target=target, name="watch", daemon=True) for target in (watch.run, watch.guard)]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        watch.end()
        for thread in threads:
            thread.join(1.0)


_ASKED = "watch/asked"


def _says(rank: int) -> str:
    return f"watch/{rank}/says"


def _process(rank: int) -> str:
    return f"watch/{rank}/process"


def _kill(process: str) -> None:
    """End a process of this host: a stopped one hears no other signal, and its launcher would wait for it for 30 s."""
    host, pid = process.rsplit(" ", 1)
    if host == socket.gethostname():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _is_stopped(process: str) -> bool:
    """Whether a process is one of this host that somebody has stopped (SIGSTOP, a debugger)."""
    host, pid = process.rsplit(" ", 1)
    try:
        # Behind the name in parentheses.
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][:1]
    except OSError:
        return False
    return host == socket.gethostname() and state in ("T", "t")


def _spell(action: object) -> str:
    """A schedule action in words; anything else as it is."""
    kind = getattr(action, "kind", None)
    if kind is None:
        return str(action)
    return f"{kind.name.lower().replace('_', ' ')} of stage {action.stage}, micro-batch {action.micro_batch}"  # type: ignore[attr-defined]

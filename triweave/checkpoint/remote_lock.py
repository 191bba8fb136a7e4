"""One job a place in an object store, as well as that can be had without locks.

An object store has no lock that dies with its holder. What it has: an object is there whole once it is written, and the
last writer wins. So the lock is an object that says who holds it, with a count that the holder moves; a claimant of
another run takes over only after it has watched the count stand still, and every claimant looks again a moment after
it has written. What is left: a claimant that sleeps between its look and its write for longer than that moment. The
holder sees it at its next sign of life and ends; until then both may have saved.

A claimant of the same run does not watch: it holds the lock of the run's folder, so its predecessor is gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from triweave.checkpoint.run_lock import LOCK_FILE, Holder, holder_from, holder_now, signs_of_life
from triweave.errors import InputError, Problem

BEAT_S = 20.0
"""Between two signs of life: 4,320 small objects written a day."""
PATIENCE_S = 90.0
"""In which the holder of another run must give one."""
SETTLE_S = 2.0
"""After which a claimant looks whether another one wrote at the same time."""


class Objects(Protocol):
    """What is used of `RemoteStore`. Every method may raise `OSError`."""

    where: str

    def read_small(self, name: str) -> bytes | None:
        """An object beside the checkpoints, None if there is none."""

    def write_small(self, name: str, content: bytes) -> None:
        """Put one, in place of the former."""

    def delete_small(self, name: str) -> None:
        """Take one away, if it is there."""


@contextmanager
def leased(
    store: Objects,
    run: str,
    tell: Callable[[str], None],
    *,
    key: str = "checkpoint.path",
    beat_s: float = BEAT_S,
    patience_s: float = PATIENCE_S,
    settle_s: float = SETTLE_S,
    lost: Callable[[], None] = lambda: os._exit(1),
) -> Iterator[None]:
    """Hold a place while the block runs.

    Args:
        store: where.
        run: identity of the run; its folder's lock is held.
        tell: is told why this takes long, when it does.
        key: of the run file, that names the place.
        beat_s: seconds between two signs of life.
        patience_s: seconds without one, after which another run's holder is taken for dead.
        settle_s: seconds after which a claimant looks again.
        lost: ends this process; called when another one has taken the place over.

    Raises:
        InputError: another run holds it, or it cannot be written to.
    """
    me = holder_now(run=run)
    try:
        former = _read(store)
        if former is not None and former.run != run:
            tell(f"{store.where}/{LOCK_FILE} is held by {former}; watching it for {patience_s:.0f} s")
            _watch(store, former, key, patience_s)
        store.write_small(LOCK_FILE, me.to_bytes())
        if former is None or former.run != run:
            time.sleep(settle_s)
            winner = _read(store)
            if winner is None or winner.token != me.token:
                raise _held(store, key, winner)
    except OSError as error:
        raise InputError(Problem(key, store.where, f"cannot be written to ({error})")) from None

    def write(holder: Holder) -> None:
        store.write_small(LOCK_FILE, holder.to_bytes())

    def taken_over(other: Holder) -> None:
        tell(f"error: {store.where} was taken over by {other}: this run ends")
        lost()

    try:
        with signs_of_life(me, lambda: _read(store), write, beat_s, taken_over):
            yield
    finally:
        with suppress(OSError):
            last = _read(store)
            if last is None or last.token == me.token:
                store.delete_small(LOCK_FILE)


def _read(store: Objects) -> Holder | None:
    content = store.read_small(LOCK_FILE)
    return None if content is None else holder_from(content)


def _watch(store: Objects, former: Holder, key: str, patience_s: float) -> None:
    """Return when the holder has shown no sign of life for so long.

    Raises:
        InputError: it is alive.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(min(5.0, patience_s / 10))
        now = _read(store)
        if now is None:
            return
        if now != former:
            raise _held(store, key, now)


def _held(store: Objects, key: str, holder: Holder | None) -> InputError:
    rule = f"is in use by another run, {holder or 'whose lock cannot be read'}"
    nearest = f"another place, or end that process and remove {store.where}/{LOCK_FILE}"
    return InputError(Problem(key, store.where, rule, nearest))

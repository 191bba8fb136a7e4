"""One job a run directory, or a folder of checkpoints: a lock that dies with its holder, on one host or on many.

Two things together. The kernel's lock (`flock`) is gone the moment its holder is, however it ended; but over some
shared file systems it holds for one host only. So the lock file also says who holds it, and its holder writes a
count into it every few seconds: a claimant from another host takes over only after it has watched the count stand
still. Nothing depends on clocks that agree.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from triweave.errors import InputError, Problem

LOCK_FILE = "lock.json"
BEAT_S = 5.0
"""Between two signs of life."""
PATIENCE_S = 30.0
"""In which a holder on another host must give one."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a run directory, as the lock file tells."""

    host: str
    pid: int
    since: str
    token: str
    """Drawn anew by every claimant."""
    beat: int = 0
    """Signs of life so far."""
    run: str = ""
    """Identity of the run, where the lock is told it."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def to_bytes(self) -> bytes:
        """The lock file."""
        return json.dumps(asdict(self)).encode().ljust(512)


def holder_now(host: str | None = None, run: str = "") -> Holder:
    """This process, as a claimant."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Holder(host or socket.gethostname(), os.getpid(), now, uuid.uuid4().hex, run=run)


def holder_from(content: bytes) -> Holder | None:
    """Who holds it, from the lock file; None if nobody does, or it cannot be told."""
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None


@contextmanager
def signs_of_life(
    me: Holder,
    read: Callable[[], Holder | None],
    write: Callable[[Holder], None],
    beat_s: float,
    taken_over: Callable[[Holder], None],
) -> Iterator[None]:
    """Move the holder's count every `beat_s` seconds while the block runs, from a thread of its own.

    Args:
        me: the holder.
        read: who the lock says holds it; it may raise `OSError`, and so may `write`.
        write: has the lock say so.
        beat_s: seconds between two signs.
        taken_over: told who else holds the lock, if somebody does; nothing more is written then.
    """
    ended = threading.Event()

    def beat() -> None:
        holder = me
        while not ended.wait(beat_s):
            # A disk or a store that is full, slow or silent for a while is no reason to end a run.
            with suppress(OSError):
                other = read()
                if other is not None and other.token != me.token:
                    taken_over(other)
                    return
                holder = replace(holder, beat=holder.beat + 1)
                write(holder)

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()


@contextmanager
def claimed(
    folder: Path,
    tell: Callable[[str], None],
    *,
    key: str = "output_dir",
    host: str | None = None,
    beat_s: float = BEAT_S,
    patience_s: float = PATIENCE_S,
    lost: Callable[[], None] = lambda: os._exit(1),
) -> Iterator[None]:
    """Hold a run directory, or a folder of checkpoints, while the block runs.

    Args:
        folder: made if it is not there.
        tell: is told why this takes long, when it does.
        key: of the run file, that names the folder.
        host: this host's name.
        beat_s: seconds between two signs of life.
        patience_s: seconds without one, after which another host's holder is taken for dead.
        lost: ends this process; called when another one has taken the directory over, as from a host that was
            suspended for so long.

    Raises:
        InputError: it cannot be written to, or another process holds it: says which, and how to take it over.
    """
    path = folder / LOCK_FILE
    me = holder_now(host)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _open(path)
    except OSError as error:
        raise InputError(Problem(key, folder, f"cannot be written to ({error.strerror})")) from None
    try:
        if not _kernel_lock(handle):
            raise _held(key, folder, path, _read(handle))
        former = _read(handle)
        if former is not None and former.host != me.host:
            tell(f"{path} is held by {former}; watching it for {patience_s:.0f} s")
            _watch(handle, former, key, folder, patience_s)
        _write(handle, me)
        if former is not None and former.host != me.host:
            # Another claimant may have watched as long, where the kernel's lock does not reach: the last one has it.
            time.sleep(2 * beat_s)
            if (winner := _read(handle)) != me:
                raise _held(key, folder, path, winner)

        def taken_over(other: Holder) -> None:
            tell(f"error: {path} was taken over by {other}: this run ends")
            lost()

        try:
            with signs_of_life(me, lambda: _read(handle), lambda now: _write(handle, now), beat_s, taken_over):
                yield
        finally:
            last = _read(handle)
            if last is None or last.token == me.token:
                path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    """The lock file, made if need be; not one that a holder has just removed."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)


def _kernel_lock(handle: int) -> bool:
    """Take the kernel's lock; True also where the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _read(handle: int) -> Holder | None:
    """Who holds it; None if nobody does, or it cannot be told."""
    return holder_from(os.pread(handle, 4096, 0))


def _write(handle: int, holder: Holder) -> None:
    # One write in place: a new file of that name would not be the one that the kernel has locked.
    text = holder.to_bytes()
    os.pwrite(handle, text, 0)
    os.ftruncate(handle, len(text))
    os.fsync(handle)


def _watch(handle: int, former: Holder, key: str, folder: Path, patience_s: float) -> None:
    """Return when the holder has shown no sign of life for `patience_s`.

    Raises:
        InputError: it is alive.
    """
    path = folder / LOCK_FILE
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(min(0.5, patience_s / 10))
        # Opened anew: a network file system shows another host's writes at an open.
        with suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
            now = _read(file.fileno())
            if now is not None and now != former:
                raise _held(key, folder, path, now)


def _held(key: str, folder: Path, path: Path, holder: Holder | None) -> InputError:
    who = str(holder) if holder is not None else "another process"
    rule = f"is in use by {who}"
    return InputError(Problem(key, folder, rule, f"another folder, or end that process and remove {path}"))

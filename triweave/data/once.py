"""Builds a folder once, however many processes ask for it at the same time, on one machine or a shared disk.

The first to create the file `NAME.attempt-0` builds; the others poll. The builder touches that file every few
seconds; when it falls silent, or its process is gone, the first to create `NAME.attempt-1` takes over. No such
file is ever removed while someone waits, so two can never hold the same attempt. The folder appears by one rename,
whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from triweave.errors import InputError, Problem, RunFailed, TriweaveError

MARK = "meta.json"
"""A finished folder holds this file; the builder writes it."""

_BEAT_S = 5.0
_SILENT_S = 120.0
"""Longer than a network file system keeps a file's old time in its cache (60 s by default)."""
_LONGEST_POLL_S = 2.0
"""Hundreds of ranks may ask the same file system: who waits longer asks less often."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One try at building: the file that claims it, and the file that says why it failed."""

    number: int
    claim: Path

    @property
    def failure(self) -> Path:
        return self.claim.with_suffix(".failed")


def build_once(
    target: Path,
    build: Callable[[Path], None],
    *,
    timeout_s: float,
    silent_s: float = _SILENT_S,
    waiting: Callable[[float], None] | None = None,
) -> None:
    """Make sure that `target` is built: by this process, or by another one while this one waits.

    Args:
        target: the folder; its name says what it holds, so an existing one is right.
        build: fills the empty folder it is given, with `MARK` in it.
        timeout_s: seconds to wait for another process.
        silent_s: seconds without a sign of life after which the builder counts as dead.
        waiting: told now and then how many seconds this process has waited.

    Raises:
        InputError: the input is wrong, here or in the process that was waited for.
        RunFailed: the builder failed, or `timeout_s` passed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    watched: _Watch | None = None
    while not (target / MARK).exists():
        newest = _newest(target)
        if newest is None or ((watched is None or watched.attempt != newest) and newest.failure.exists()):
            _try_to_build(target, newest, build)
            continue
        if watched is None or watched.attempt != newest:
            watched = _Watch(newest)
        _raise_failure(newest)
        if watched.is_dead(silent_s):
            _try_to_build(target, newest, build)
            continue
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise RunFailed(
                f"waited {timeout_s:.0f} s for {target}, which {_holder(newest.claim)} is still building; "
                f"if that process is gone, delete {newest.claim}"
            )
        if waiting is not None:
            waiting(waited)
        time.sleep(min(_LONGEST_POLL_S, 0.1 + waited / 10))


class _Watch:
    """Watches one attempt for signs of life."""

    def __init__(self, attempt: _Attempt) -> None:
        self.attempt = attempt
        self._touched = _touched(attempt.claim)
        self._seen = time.monotonic()

    def is_dead(self, silent_s: float) -> bool:
        """Whether the builder is known to be gone, or has been silent for `silent_s`, by this machine's clock."""
        touched = _touched(self.attempt.claim)
        if touched != self._touched:
            self._touched, self._seen = touched, time.monotonic()
        return _is_gone(self.attempt.claim) or time.monotonic() - self._seen > silent_s


def _try_to_build(target: Path, last: _Attempt | None, build: Callable[[Path], None]) -> None:
    """Claim the attempt after `last` and build; returns without a word when another process claimed it first."""
    number = 0 if last is None else last.number + 1
    attempt = _Attempt(number, target.with_name(f"{target.name}.attempt-{number}"))
    try:
        handle = os.open(attempt.claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
    partial = target.with_name(f"{target.name}.partial-{number}")
    try:
        with _beating(attempt.claim):
            if not (target / MARK).exists():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                build(partial)
                _publish(partial, target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Exception) and (target / MARK).exists():
            _clean(target)  # given up for dead, this process was overtaken
            return
        _record_failure(attempt, error)
        raise
    _clean(target)


def _publish(partial: Path, target: Path) -> None:
    """Give the finished folder its name, unless another process was faster."""
    with (partial / MARK).open("rb") as mark:
        os.fsync(mark.fileno())
    try:
        os.rename(partial, target)
    except OSError as error:
        if not (target / MARK).exists():
            raise RunFailed(f"{target} is in the way ({error.strerror}); delete it") from None
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _beating(claim: Path) -> Iterator[None]:
    """Touch `claim` every few seconds while the body runs."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(claim)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _newest(target: Path) -> _Attempt | None:
    prefix = f"{target.name}.attempt-"
    attempts = [
        _Attempt(int(number), path)
        for path in target.parent.glob(f"{prefix}*")
        if (number := path.name.removeprefix(prefix)).isdigit()
    ]
    return max(attempts, key=lambda attempt: attempt.number, default=None)


def _touched(claim: Path) -> int:
    try:
        return claim.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _read(path: Path) -> dict[str, object]:
    """What a small JSON file says; empty while it is being written."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_gone(claim: Path) -> bool:
    """Whether the builder ran on this host and its process has ended."""
    said = _read(claim)
    pid = said.get("pid")
    if said.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _holder(claim: Path) -> str:
    said = _read(claim)
    return f"process {said.get('pid', 'unknown')} on {said.get('host', 'an unknown host')}"


def _record_failure(attempt: _Attempt, error: BaseException) -> None:
    """Leave word for those who wait. A later call starts afresh: whatever was wrong may be mended by then."""
    said: dict[str, object] = {"message": str(error) or type(error).__name__}
    if isinstance(error, InputError):
        said["problems"] = [
            [p.key, None if p.value is None else str(p.value), p.rule, p.nearest, p.where] for p in error.problems
        ]
    elif not isinstance(error, TriweaveError):
        said["message"] = f"{type(error).__name__}: {error}"
    written = attempt.failure.with_suffix(".writing")
    with contextlib.suppress(OSError):
        written.write_text(json.dumps(said), encoding="utf-8")
        os.replace(written, attempt.failure)


def _raise_failure(attempt: _Attempt) -> None:
    said = _read(attempt.failure)
    problems = said.get("problems")
    if isinstance(problems, list):
        raise InputError(Problem(*fields) for fields in problems)
    if said:
        raise RunFailed(f"{_holder(attempt.claim)} could not prepare the data: {said['message']}")


def _clean(target: Path) -> None:
    """Remove what attempts left behind, now that the folder is there for all to see."""
    for path in target.parent.glob(f"{target.name}.*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

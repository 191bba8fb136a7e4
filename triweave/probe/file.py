"""The profile on the disk: whole or not there, and continued where it is of this machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from triweave.errors import InputError, Problem
from triweave.planner.profile import Profile, profile_text, read_profile

SAME = ("gpu", "gpu_model", "num_gpus", "torch", "cuda", "nccl")
"""What must agree for measurements to belong together."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep the profile to this process for as long as the block lasts, by a lock file beside it.

    Two probes that measure at once would disturb each other, and the one that writes last would drop what the other
    has kept.

    Raises:
        InputError: it cannot be written there, or another process measures for it.
    """
    if not path.parent.is_dir():
        raise InputError(Problem("--out", path, "cannot be written: there is no such folder"))
    if path.is_dir():
        raise InputError(Problem("--out", path, "is a folder", str(path / "profile.yaml")))
    if path.exists() and not path.is_file():
        raise InputError(Problem("--out", path, "is no ordinary file", "profile.yaml"))
    lock = path.with_name(f".{path.name}.lock")
    try:
        file = lock.open("a")
    except OSError as error:
        raise InputError(Problem("--out", path, f"cannot be written ({error.strerror})")) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(Problem("--out", path, "is what another probe measures for now")) from None
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def begin(path: Path, machine: Profile, *, force: bool) -> Profile:
    """The profile to continue: what the file holds of this machine, or nothing yet.

    Args:
        path: where it is kept.
        machine: what `identity.identify` says.
        force: start anew whatever the file holds.

    Raises:
        InputError: the file is of another machine, or is none of ours, and it is not to be overwritten.
    """
    if force or not path.exists():
        return machine
    try:
        kept = read_profile(path)
    except InputError as error:
        first = error.problems[0]
        raise InputError(Problem("--out", path, f"holds no profile ({first}); --force overwrites it")) from None
    apart = [name for name in SAME if getattr(kept, name) != getattr(machine, name)]
    if apart:
        theirs, ours = (", ".join(f"{name} {getattr(one, name)}" for name in apart) for one in (kept, machine))
        rule = f"holds measurements of another machine ({theirs}; this is {ours}); --force overwrites them"
        raise InputError(Problem("--out", path, rule))
    return replace(kept, driver=machine.driver, power_limit_watts=machine.power_limit_watts)


def write(path: Path, profile: Profile) -> None:
    """Put the whole file in place at once.

    Raises:
        InputError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(profile_text(profile))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InputError(Problem("--out", path, f"cannot be written ({error.strerror})")) from None

"""The profile on the disk: whole or not there, and continued where it is of this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from triweave.errors import InputError, Problem
from triweave.planner.profile import Profile, profile_text, read_profile

SAME = ("gpu", "gpu_model", "num_gpus", "torch", "cuda", "nccl")
"""What must agree for measurements to belong together."""


def begin(path: Path, machine: Profile, *, force: bool) -> Profile:
    """The profile to continue: what the file holds of this machine, or nothing yet.

    Args:
        path: where it is kept.
        machine: what `identity.identify` says.
        force: start anew whatever the file holds.

    Raises:
        InputError: the file is of another machine, or is none of ours, and it is not to be overwritten; or it cannot
            be written there.
    """
    if not path.parent.is_dir():
        raise InputError(Problem("--out", path, "cannot be written: there is no such folder"))
    if path.is_dir():
        raise InputError(Problem("--out", path, "is a folder", str(path / "profile.yaml")))
    if force or not path.exists():
        return machine
    kept = read_profile(path)
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

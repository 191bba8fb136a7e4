"""Whose checkpoints lie in a place: every manifest names the run that wrote it, and a run goes on from its own alone.

Locks keep two jobs apart that run at the same time. Two runs that name one place at different times meet only here: the
second would go on from the first one's weights, and delete its checkpoints as its own old ones.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from triweave.checkpoint.durable import new_file, sync
from triweave.checkpoint.manifest import read_manifest
from triweave.checkpoint.store import DamagedCheckpoint, Store
from triweave.errors import RunFailed

IDENTITY_FILE = "identity.json"
"""In a run's folder."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A run, as manifests name it."""

    run: str
    """Drawn when the run begins, and kept by its folder."""
    took_over: tuple[str, ...] = ()
    """Runs whose checkpoints it was told to go on from, in the same place."""

    def owns(self, run: str) -> bool:
        """Whether what `run` wrote is this run's. What names none was not written by a run (`convert`)."""
        return run in ("", self.run, *self.took_over)

    def taking_over(self, run: str) -> Owner:
        """This run, owning what `run` wrote too."""
        return self if self.owns(run) else replace(self, took_over=(*self.took_over, run))


def new_owner() -> Owner:
    """A run that nobody has seen before."""
    return Owner(uuid.uuid4().hex)


def read_owner(folder: Path) -> Owner | None:
    """The run of a folder; None if it has none yet, or it cannot be read."""
    try:
        values = json.loads((folder / IDENTITY_FILE).read_text(encoding="utf-8"))
        owner = Owner(str(values["run"]), tuple(map(str, values["took_over"])))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return owner if owner.run else None


def write_owner(folder: Path, owner: Owner) -> None:
    """Keep it, durably: what is saved from now on names it.

    Raises:
        OSError: the disk refuses.
    """
    partial = folder / f".{IDENTITY_FILE}.partial"
    partial.unlink(missing_ok=True)
    with new_file(partial) as file:
        file.write((json.dumps(asdict(owner)) + "\n").encode())
    partial.replace(folder / IDENTITY_FILE)
    sync(folder)


def writer_of(store: Store, name: str) -> str:
    """The run that wrote a checkpoint; empty if its manifest names none, or cannot be read."""
    try:
        return read_manifest(store, name).run
    except DamagedCheckpoint:
        return ""


def check_owned(store: Store, names: Iterable[str], owner: Owner) -> None:
    """See that none of these checkpoints is another run's.

    Raises:
        RunFailed: which one is.
    """
    for name in names:
        if not owner.owns(writer_of(store, name)):
            raise RunFailed(f"{name} there is of another run, which writes to the same place")

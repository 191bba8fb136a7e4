"""From a path or a URL to the store that is there."""

from __future__ import annotations

from pathlib import Path

from triweave.checkpoint.local_store import LocalStore
from triweave.checkpoint.store import Store


def open_store(where: str | Path) -> Store:
    """The store at a path or at a URL (`s3://bucket/run`, `memory://run`: what fsspec knows)."""
    if "://" in str(where):
        # Not needed elsewhere, and fsspec brings along what it has found installed.
        from triweave.checkpoint.remote_store import RemoteStore

        return RemoteStore(str(where))
    return LocalStore(Path(where))


def locate(checkpoint: str | Path) -> tuple[Store, str]:
    """The store that holds a checkpoint, and the checkpoint's name in it."""
    if "://" in str(checkpoint):
        parent, _, name = str(checkpoint).rstrip("/").rpartition("/")
        return open_store(parent), name
    path = Path(checkpoint).resolve()
    return LocalStore(path.parent, shown=Path(checkpoint).parent), path.name

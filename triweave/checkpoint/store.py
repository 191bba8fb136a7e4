"""Where checkpoints lie: a folder of folders, on a disk of this host, on a shared one, or behind an fsspec URL.

A checkpoint is written into a working place that no reader takes for one, and begins to exist in one moment: by a
rename on a disk, by the writing of its manifest in an object store, where there is no rename.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

from triweave.checkpoint.durable import HashedFile

MANIFEST_FILE = "manifest.json"
HINT_FILE = "latest"


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be loaded: which file of it is bad, and how."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file} {reason}")


class Store(Protocol):
    """A folder of checkpoints. Every method may raise `OSError`."""

    @property
    def where(self) -> str:
        """Path or URL, for messages."""

    @property
    def reads_back(self) -> bool:
        """Whether what was written is worth reading again at once, to see that the disk has it."""

    def held(self, run: str, key: str, tell: Callable[[str], None]) -> AbstractContextManager[None]:
        """Keep other jobs out while the block runs, whatever their run's folder is.

        Args:
            run: identity of the run, whose folder's lock is held.
            key: of the run file, that names this place.
            tell: is told why this takes long, when it does.

        Raises:
            InputError: another job is here.
        """

    def names(self) -> list[str]:
        """Names of the folders, in no order; none where there is nothing yet."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes of a folder's files in bytes, by name."""

    def open(self, folder: str, name: str, *, fresh: bool = False) -> BinaryIO:
        """A file, to read; `fresh` asks for the disk's bytes and not for those that memory still has."""

    def create(self, folder: str, name: str) -> AbstractContextManager[HashedFile]:
        """A new file, to write; it is durable when the block ends."""

    def begin(self, name: str) -> str:
        """Make an empty folder for a checkpoint that will be called `name`; returns the name to write it under."""

    def commit(self, working: str, name: str, manifest: bytes) -> None:
        """Write the manifest and make the checkpoint exist, durably, in place of one of that name if there is one."""

    def delete(self, folder: str) -> None:
        """Take a checkpoint away. It is gone as a whole, or not at all; nothing happens if there is none."""

    def sweep(self) -> None:
        """Clean up after a process that was stopped in the middle. Nobody else may be writing here."""

    def hint(self) -> str | None:
        """The name that was published last, if anybody remembers; to be believed only after a look at it."""

    def give_hint(self, name: str) -> None:
        """Remember the name that was published last."""


def read_bytes(store: Store, folder: str, name: str, limit_bytes: int) -> bytes:
    """A small file's content.

    Raises:
        DamagedCheckpoint: it is missing, not a plain file, or larger than `limit_bytes`.
    """
    try:
        with store.open(folder, name) as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise DamagedCheckpoint(name, f"cannot be read ({reason_of(error)})") from None
    if len(content) > limit_bytes:
        raise DamagedCheckpoint(name, f"has more than the {limit_bytes:,} bytes that such a file can have")
    return content


def plain_name(name: object) -> str:
    """`name`, if it is that of a file beside others: not a path, not the folder itself.

    Raises:
        DamagedCheckpoint: it could lead out of the folder.
    """
    good = isinstance(name, str) and 0 < len(name.encode("utf-8", "replace")) <= 255
    if not good or name in (".", "..") or any(mark in str(name) for mark in "/\\\0:"):
        raise DamagedCheckpoint(f"{name!r:.80}", "is not the name of a file of a checkpoint")
    return str(name)


def reason_of(error: OSError) -> str:
    """What the system says, without the path, which may be a working name."""
    return error.strerror or str(error) or type(error).__name__

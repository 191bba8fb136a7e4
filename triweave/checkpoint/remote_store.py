"""Checkpoints behind a URL that fsspec knows: S3, Google Cloud Storage, memory for tests.

An object store has no rename (fsspec's copies object by object) and no fsync: an object is there, whole, when its
writer has closed it. So data are written in place, and the manifest last: a checkpoint without one does not exist.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import BinaryIO, cast

import fsspec

from triweave.checkpoint.durable import HashedFile
from triweave.checkpoint.remote_lock import leased
from triweave.checkpoint.store import HINT_FILE, MANIFEST_FILE, plain_name

_STEP = re.compile(r"step-\d+")


class RemoteStore:
    """Checkpoints in an object store."""

    reads_back = False
    """The store checks what it receives, and reading it again would cost what loading costs."""

    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")
        # A disk has folders that must be there; object stores have none.
        folders = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        self._fs, root = fsspec.core.url_to_fs(self.where, use_listings_cache=False, **folders)
        self._root = str(root).rstrip("/")

    def _path(self, *names: str) -> str:
        return posixpath.join(self._root, *names)

    def _list(self, path: str) -> list[tuple[str, str, int]]:
        try:
            entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        except OSError:
            raise
        except Exception as error:  # clients of object stores have kinds of their own, as for want of credentials
            raise OSError(f"{type(error).__name__}: {error}") from error
        return [(posixpath.basename(e["name"].rstrip("/")), e["type"], int(e["size"] or 0)) for e in entries]

    def held(self, run: str, key: str, tell: Callable[[str], None]) -> AbstractContextManager[None]:
        """By an object that says who is here: see `remote_lock` for what that can promise."""
        return leased(self, run, tell, key=key)

    def names(self) -> list[str]:
        """What stands before a slash."""
        return [name for name, kind, _ in self._list(self._root) if kind == "directory" and name]

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes of the objects."""
        return {name: size for name, kind, size in self._list(self._path(folder)) if kind == "file"}

    def open(self, folder: str, name: str, *, fresh: bool = False) -> BinaryIO:
        """An object; what is read is always the store's."""
        return cast(BinaryIO, self._fs.open(self._path(folder, plain_name(name)), "rb"))

    @contextmanager
    def create(self, folder: str, name: str) -> Iterator[HashedFile]:
        """An object; it is there when the block ends, and not at all if the block fails."""
        path = self._path(folder, plain_name(name))
        target = self._fs.open(path, "wb", autocommit=False)
        file = HashedFile(lambda view: int(target.write(bytes(view)) or view.nbytes))
        try:
            yield file
            file.finish()
            target.close()
            target.commit()
        except BaseException:
            with suppress(Exception):
                target.discard()
            # Not every file system waits for `commit`.
            with suppress(Exception):
                self._fs.rm_file(path)
            raise
        finally:
            file.abandon()

    def begin(self, name: str) -> str:
        """The final place, emptied; the manifest goes first, so that nothing half deleted is taken for whole."""
        self.delete(name)
        self._fs.makedirs(self._path(name), exist_ok=True)
        return name

    def commit(self, working: str, name: str, manifest: bytes) -> None:
        """Write the manifest: from then on the checkpoint exists."""
        with self.create(name, MANIFEST_FILE) as file:
            file.write(manifest)

    def delete(self, folder: str) -> None:
        """The manifest first: what is left of an interrupted deletion is no checkpoint."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(folder, MANIFEST_FILE))
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(folder), recursive=True)

    def sweep(self) -> None:
        """Remove what a save or a deletion has left without a manifest."""
        for name in self.names():
            if _STEP.fullmatch(name) and MANIFEST_FILE not in self.sizes(name):
                self.delete(name)

    def hint(self) -> str | None:
        """The content of `latest`."""
        try:
            with self._fs.open(self._path(HINT_FILE), "rb") as file:
                return str(file.read(256).decode("ascii").strip())
        except (OSError, UnicodeDecodeError):
            return None

    def give_hint(self, name: str) -> None:
        """One small object, replaced whole."""
        self.write_small(HINT_FILE, f"{name}\n".encode())

    def read_small(self, name: str) -> bytes | None:
        """An object beside the checkpoints, None if there is none."""
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write_small(self, name: str, content: bytes) -> None:
        """Put one, in place of the former."""
        self._fs.pipe_file(self._path(name), content)

    def delete_small(self, name: str) -> None:
        """Take one away, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

"""Checkpoints on a disk, this host's or a shared one."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from triweave.checkpoint.durable import HashedFile, new_file, sync
from triweave.checkpoint.run_lock import claimed
from triweave.checkpoint.store import HINT_FILE, MANIFEST_FILE, plain_name

_LEFT_OVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.(?P<kind>partial|former|deleted)")


class LocalStore:
    """A folder of checkpoints. A rename makes a checkpoint exist."""

    reads_back = True

    def __init__(self, root: Path, shown: Path | None = None) -> None:
        """`shown` is the root as the user wrote it."""
        self.root = root
        self.where = str(shown or root)

    def held(self, run: str, key: str, tell: Callable[[str], None]) -> AbstractContextManager[None]:
        """By a lock file beside the checkpoints."""
        return claimed(self.root, tell, key=key)

    def names(self) -> list[str]:
        """Real folders only: a link may lead anywhere."""
        try:
            with os.scandir(self.root) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes of the plain files; links and the like are not seen, and so count as missing."""
        with os.scandir(self._real(folder)) as entries:
            plain = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in plain}

    def open(self, folder: str, name: str, *, fresh: bool = False) -> BinaryIO:
        """A plain file; a link is refused, and a pipe is not waited for."""
        path = self._real(folder) / plain_name(name)
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(path))
            if fresh:
                # Only clean pages go: the file must have been flushed before.
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            return os.fdopen(handle, "rb")
        except BaseException:
            os.close(handle)
            raise

    def _real(self, folder: str) -> Path:
        if (self.root / folder).is_symlink():
            raise OSError(errno.ELOOP, "a link, not a folder", str(self.root / folder))
        return self.root / folder

    def create(self, folder: str, name: str) -> AbstractContextManager[HashedFile]:
        """A file that no other save has written to."""
        return new_file(self.root / folder / plain_name(name))

    def begin(self, name: str) -> str:
        """A folder with a dot and a random part in its name, beside the checkpoints: a rename moves it."""
        working = _aside(name, "partial")
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / working).mkdir()
        return working

    def commit(self, working: str, name: str, manifest: bytes) -> None:
        """One rename. A folder that has the name already steps aside first, and comes back if that fails."""
        with self.create(working, MANIFEST_FILE) as file:
            file.write(manifest)
        sync(self.root / working)
        former = _aside(name, "former")
        replaces = (self.root / name).exists()
        if replaces:
            (self.root / name).rename(self.root / former)
        try:
            (self.root / working).rename(self.root / name)
        except OSError:
            if replaces:
                (self.root / former).rename(self.root / name)
            raise
        sync(self.root)
        if replaces:
            shutil.rmtree(self.root / former)

    def delete(self, folder: str) -> None:
        """Under another name first: nobody finds half a checkpoint. A working folder nobody looks for."""
        if not (self.root / folder).exists():
            return
        gone = folder
        if _LEFT_OVER.fullmatch(folder) is None:
            gone = _aside(folder, "deleted")
            (self.root / folder).rename(self.root / gone)
        shutil.rmtree(self.root / gone)

    def sweep(self) -> None:
        """Remove working folders and half-deleted ones; bring back what was to be replaced and was not."""
        for entry in self.names():
            if match := _LEFT_OVER.fullmatch(entry):
                if match["kind"] == "former" and not (self.root / match["name"]).exists():
                    (self.root / entry).rename(self.root / match["name"])
                else:
                    shutil.rmtree(self.root / entry)

    def hint(self) -> str | None:
        """The content of `latest`."""
        try:
            with self.open(".", HINT_FILE) as file:
                return file.read(256).decode("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None

    def give_hint(self, name: str) -> None:
        """Replace `latest` in one step."""
        partial = self.root / f".{HINT_FILE}.partial"
        partial.unlink(missing_ok=True)
        with new_file(partial) as file:
            file.write(f"{name}\n".encode())
        partial.replace(self.root / HINT_FILE)


def _aside(name: str, kind: str) -> str:
    return f".{name}.{uuid.uuid4().hex[:12]}.{kind}"

"""Files that appear together and whole, and never over something else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from triweave.errors import InputError, Problem


def write_files(folder: Path, texts: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write all of `texts` into `folder`, or none.

    Args:
        folder: made if it is not there.
        texts: what to write, by file name.
        force: replace files that are there.

    Returns:
        The paths, in the order of `texts`.

    Raises:
        InputError: a file is there already, or something cannot be written.
    """
    paths = [folder / name for name in texts]
    there = [path for path in paths if os.path.lexists(path)]
    if not force and there:
        raise InputError(Problem("file", path, "is there already; --force replaces it") for path in there)
    waiting: list[tuple[str, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            if path.is_dir():
                raise InputError(Problem("file", path, "is a folder"))
            handle, name = tempfile.mkstemp(prefix=".", dir=folder)
            waiting.append((name, path))
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            # As a file that an editor makes; a script is run by bash, which only reads it.
            os.chmod(name, 0o666 & ~_umask())
        while waiting:
            os.replace(*waiting[0])
            waiting.pop(0)
    except OSError as error:
        raise InputError(Problem("--out", folder, f"cannot be written ({error.strerror})")) from None
    finally:
        for name, _ in waiting:
            os.unlink(name)
    return paths


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

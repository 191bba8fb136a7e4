"""A folder that is there whole or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triweave.checkpoint.durable import sync


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Gives a hidden folder beside `folder` to write into; it takes the name when the block ends without an exception.

    What is in it is flushed to the disk first. A folder of that name is renamed away and deleted last. A block that is
    left by an exception, Ctrl-C among them, leaves nothing.

    Raises:
        OSError: the disk refuses.
    """
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    aside = folder.with_name(f".{folder.name}.replaced-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if folder.exists():
            folder.rename(aside)
        try:
            partial.rename(folder)
        except BaseException:
            if aside.exists():
                aside.rename(folder)
            raise
        sync(folder.parent)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

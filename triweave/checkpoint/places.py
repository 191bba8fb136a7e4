"""From a path or a URL to the store that is there."""

from __future__ import annotations

import re
from pathlib import Path

from triweave.checkpoint.local_store import LocalStore
from triweave.checkpoint.store import Store
from triweave.errors import InputError, Problem, closest

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)(.*)")


def open_store(where: str | Path, key: str = "checkpoint.path") -> Store:
    """The store at a path or at a URL (`s3://bucket/run`, `memory://run`: what fsspec knows).

    Args:
        where: path or URL.
        key: of the run file, that names it.

    Raises:
        InputError: the URL names no place, or fsspec cannot speak to it.
    """
    if "://" in str(where):
        return _remote(str(where), key)
    if isinstance(where, str) and (meant := _ONE_SLASH.fullmatch(where)):
        raise InputError(Problem(key, where, "has one slash where a URL has two", f"{meant[1]}://{meant[2]}"))
    return LocalStore(Path(where))


def _remote(url: str, key: str) -> Store:
    # Not needed elsewhere, and fsspec brings along what it has found installed.
    from fsspec import available_protocols

    from triweave.checkpoint.remote_store import RemoteStore

    scheme, _, place = url.partition("://")
    if not scheme or not place.strip("/"):
        raise InputError(Problem(key, url, "must name a place, as in s3://bucket/run"))
    try:
        return RemoteStore(url)
    except ImportError as error:
        raise InputError(Problem(key, url, f"needs a package that is not installed ({error})")) from None
    except (ValueError, OSError) as error:
        near = closest(scheme.lower(), available_protocols())
        meant = None if near in (None, scheme) else f"{near}://{place}"
        raise InputError(Problem(key, url, f"is not a URL that fsspec can open ({error})", meant)) from None


def locate(checkpoint: str | Path) -> tuple[Store, str]:
    """The store that holds a checkpoint, and the checkpoint's name in it.

    Raises:
        InputError: as `open_store`, of the key `resume`.
    """
    if "://" in str(checkpoint):
        parent, _, name = str(checkpoint).rstrip("/").rpartition("/")
        return open_store(parent, "resume"), name
    path = Path(checkpoint).resolve()
    return LocalStore(path.parent, shown=Path(checkpoint).parent), path.name

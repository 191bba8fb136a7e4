"""JSON objects from files that somebody else wrote: bounded in size and depth, and no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triweave.errors import InputError, Problem

MAX_CONFIG_BYTES = 2**20
"""Of a file of settings."""


def read_json_object(path: Path, key: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: the file.
        key: what names it in a message.
        max_bytes: a larger file is refused unread.

    Raises:
        InputError: it cannot be read, is too large, not UTF-8, not JSON, nested deeper than Python's stack, holds a
            number of thousands of digits or a key twice, or is no object.
    """
    try:
        if not path.is_file():
            raise InputError(Problem(key, path, "is not a file"))
        size = path.stat().st_size
        if size > max_bytes:
            raise InputError(Problem(key, path, f"has {size:,} bytes; such a file has at most {max_bytes:,}"))
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(Problem(key, path, f"cannot be read ({error.strerror})")) from None
    return parse_json_object(raw, path, key)


def parse_json_object(raw: bytes, path: Path, key: str, what: str = "content") -> dict[str, Any]:
    """The JSON object in `raw`, which was read from `path`.

    Raises:
        InputError: as `read_json_object`.
    """
    try:
        parsed = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InputError(Problem(key, path, f"has a {what} that is not JSON ({error})")) from None
    if not isinstance(parsed, dict):
        raise InputError(Problem(key, path, f"has a {what} that is not a JSON object"))
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("a key appears twice")
    return parsed

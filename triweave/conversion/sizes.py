"""Sizes of files as people write them."""

from __future__ import annotations

import re

from triweave.errors import InputError, Problem

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SMALLEST = 1_000


def read_size(text: str, key: str) -> int:
    """Bytes of `5GB`, `500MB`, `4GiB`; the units are Hugging Face's.

    Raises:
        InputError: it is no size, or less than a kilobyte.
    """
    match = re.fullmatch(r"(\d{1,6})\s*([A-Za-z]{1,3})", text.strip())
    size = int(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0
    if size < _SMALLEST:
        raise InputError(Problem(key, text, f"must be a size of at least {_SMALLEST} bytes with its unit", "5GB"))
    return size

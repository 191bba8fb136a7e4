"""One line of a fault campaign's table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """What was tried, and how often it came out as it must.

    A module of this folder has `run(quick: bool, out: Path) -> list[Row]`; `out` is an empty folder to work in.
    """

    test: str
    tried: int
    good: int
    """Of the tried; the campaign has passed when they are equal."""
    detail: str = ""

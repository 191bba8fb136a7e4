"""One hostile file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BESIDE = "beside"
"""Name of the folder beside the hostile one, into which nothing may lead."""


@dataclass(frozen=True, slots=True)
class Case:
    """A hostile folder and what reads it."""

    name: str
    make: Callable[[Path], None]
    """Spoils a folder of good files."""
    read: Callable[[Path], None]


class Bait:
    """Runs when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.folder / "bait"),))

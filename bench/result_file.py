"""Where a bench writes what it has found, unless it is told otherwise: below `runs/`, which git ignores."""

from __future__ import annotations

from pathlib import Path


def result_file(name: str) -> Path:
    """The file of an option, in a folder that is there. As the `type` of an option it is asked for the default too."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path

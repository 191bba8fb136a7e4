"""What tests see of files, and do to them."""

from __future__ import annotations

from pathlib import Path


def names(folder: Path) -> list[str]:
    """What a folder holds, hidden names too."""
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, which lies in some tensor's numbers."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

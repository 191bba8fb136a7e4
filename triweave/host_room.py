"""Memory of this host, and what control groups (containers, Slurm, systemd) leave of it to this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files of a group's limit and use, and the word for what of its use are pages of files, which go when memory is asked
for (the kernel's cgroup-v2.rst and cgroup-v1/memory.rst)."""


@dataclass(frozen=True, slots=True)
class HostRoom:
    """How much memory there is. Bytes."""

    total_bytes: int
    """The host's, or the lowest limit of a control group that this process is in: more there can never be."""
    available_bytes: int
    """What can be had now, by the host and by every group."""


def host_room(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> HostRoom:
    """Look at this host.

    Args:
        proc: where the kernel tells of processes.
        groups: where control groups are mounted, of either version.
    """
    meminfo = proc / "meminfo"
    total, available = (1024 * _number_after(word, meminfo) for word in ("MemTotal:", "MemAvailable:"))
    for folder, (limit_file, use_file, cached_word) in _groups_of_this_process(proc, groups):
        try:
            limit = (folder / limit_file).read_text(encoding="ascii").strip()
            if limit == "max":
                continue
            used = int((folder / use_file).read_text(encoding="ascii"))
            left = int(limit) - used + _number_after(cached_word, folder / "memory.stat")
        except (OSError, ValueError):
            continue  # the root has no limit, and a container may not see the groups around it
        total, available = min(total, int(limit)), max(0, min(available, left))
    return HostRoom(total, available)


def _groups_of_this_process(proc: Path, groups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of the groups that this process is in, from the innermost to the root, with the names of their files.

    In a container the path may be the host's, which is not there: the container's own group is then the root.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (groups / "memory", _V1) if controllers else (groups, _V2)
        folder = root.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
        while folder != root:
            yield folder, names
            folder = folder.parent
        yield root, names


def _number_after(word: str, path: Path) -> int:
    lines = path.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[0] == word)

"""Memory of hosts: what control groups leave of it, and what a run wants of it before it begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import resolved_run

from triweave.cluster import GIB
from triweave.errors import InputError
from triweave.host_room import HostRoom, host_room
from triweave.planner.forecast import stages_of
from triweave.training.host_need import ROOM, Host, check_offload, hosts_of, no_room_for_copies, warnings
from triweave.training.process import Process

MIB = 2**20


def make_tree(folder: Path, cgroup: str, groups: dict[str, tuple[str, str, str]]) -> HostRoom:
    """What is found on a host of 1000 MiB, 900 of them available, with such files of its control groups."""
    proc, mount = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {1000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {900 * 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for path, (limit, used, cached) in groups.items():
        group = mount / path
        group.mkdir(parents=True, exist_ok=True)
        is_v1 = path.startswith("memory")
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(f"{limit}\n")
        (group / ("memory.usage_in_bytes" if is_v1 else "memory.current")).write_text(f"{used}\n")
        prefix = "total_" if is_v1 else ""
        (group / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {cached}\n")
    return host_room(proc, mount)


def mib(*numbers: int) -> tuple[str, ...]:
    """Bytes as a group's files have them."""
    return tuple(str(number * MIB) for number in numbers)


NO_LIMIT_V1 = "9223372036854771712"


@pytest.mark.parametrize(
    ("cgroup", "groups", "room"),
    [
        ("0::/\n", {}, (1000, 900)),
        ("0::/\n", {".": mib(400, 300, 50)}, (400, 150)),
        ("0::/\n", {".": ("max", *mib(300, 50))}, (1000, 900)),
        # Slurm: the job has the limit, the task's own group has none.
        (
            "0::/job_7/step_0/task_0\n",
            {"job_7": mib(500, 450, 0), "job_7/step_0/task_0": ("max", *mib(10, 0))},
            (500, 50),
        ),
        # The tightest of several counts, whichever level it is on.
        ("0::/a/b\n", {"a": mib(300, 20, 0), "a/b": mib(800, 790, 0)}, (300, 10)),
        ("4:memory:/j\n0::/\n", {"memory/j": mib(200, 150, 20), "memory": (NO_LIMIT_V1, *mib(700, 0))}, (200, 70)),
        # A container that is told the path its host has for it.
        ("0::/kubepods/pod1/c\n", {".": mib(600, 100, 0)}, (600, 500)),
        ("0::/../../other\n", {".": mib(600, 100, 0)}, (600, 500)),
        # More in use than there may be: what a limit that was lowered leaves.
        ("0::/\n", {".": mib(400, 500, 0)}, (400, 0)),
    ],
    ids=["none", "own", "no limit", "slurm", "tightest", "version 1", "container", "outside", "beyond"],
)
def test_groups_limit_what_a_host_has(
    tmp_path: Path, cgroup: str, groups: dict[str, tuple[str, str, str]], room: tuple[int, int]
) -> None:
    """The limit of every group from the process's own to the root counts, and pages of files are room."""
    found = make_tree(tmp_path, cgroup, groups)
    assert (found.total_bytes // MIB, found.available_bytes // MIB) == room


def test_memory_of_this_host_is_found() -> None:
    """What can be had is more than nothing and at most what the host has."""
    found = host_room()
    assert 0 < found.available_bytes <= found.total_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_offload_that_a_host_cannot_hold_is_refused() -> None:
    """The sum over the ranks of this host is what counts; the message has both numbers, and what fits."""
    run = resolved_run(layout__offload="[attention, mlp]")
    first, last = (stage.host_bytes for stage in (stages_of(run)[0], stages_of(run)[-1]))
    assert first > last > 0
    for node, of_rank in ((0, first), (3, last)):
        process = Process(8 * node + 5, 32, 5, 8)
        check_offload(run, process, HostRoom(8 * of_rank, 0))
        with pytest.raises(InputError) as refused:
            check_offload(run, process, HostRoom(8 * of_rank - 1, 0))
        message = str(refused.value)
        assert message.startswith(f"layout.offload = [attention, mlp]: keeps {8 * of_rank / GIB:.2f} GiB")
        nearest = [one for one in ("[attention]", "[mlp]") if one in message.rpartition("nearest")[2]]
        assert len(nearest) == 1
        # What is named is let through.
        check_offload(resolved_run(layout__offload=nearest[0]), process, HostRoom(8 * of_rank - 1, 0))
    with pytest.raises(InputError, match=r"\[\]"):
        check_offload(run, Process(0, 32, 0, 8), HostRoom(1, 1))
    check_offload(resolved_run(), Process(0, 32, 0, 8), HostRoom(1, 1))


def test_ranks_of_a_host_are_added_up() -> None:
    """Every host by itself; the least that one of its ranks has seen free counts."""
    said = [("a boot", 10, 1, 100), ("b boot", 20, 0, 50), ("a boot", 30, 2, 90), ("a other", 5, 0, 7)]
    assert hosts_of(said) == [Host("a", 2, 40, 3, 90), Host("b", 1, 20, 0, 50), Host("a", 1, 5, 0, 7)]


def test_copies_leave_room_for_offload() -> None:
    """They are made where both together fit; where not, the line names the host with the least room."""
    fits, small, smaller = Host("a", 8, 60, 20, 100), Host("b", 8, 60, 21, 100), Host("c", 8, 90, 21, 100)
    assert ROOM == 0.8
    assert no_room_for_copies([fits]) is None
    assert "GiB on b," in str(no_room_for_copies([fits, small]))
    assert "GiB on c," in str(no_room_for_copies([small, fits, smaller]))


def test_offload_without_free_memory_is_warned_of() -> None:
    """A host whose free memory is less than what is offloaded gets a line; it may still end well."""
    tight = Host("c", 8, 0, 9 * GIB, 8 * GIB)
    (line,) = warnings([Host("a", 8, 9 * GIB, 8 * GIB, 8 * GIB), tight])
    assert line.startswith("warning   layout.offload keeps up to 9.00 GiB in the memory of c (8 ranks), where 8.00 GiB")

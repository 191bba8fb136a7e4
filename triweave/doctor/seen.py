"""What one rank sees: plain values that go through the store as JSON, for ranks may differ in all else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class GpuSeen:
    """A GPU as its driver tells; None where it does not."""

    model: str
    total_bytes: int
    free_bytes: int
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    degrees: float | None = None
    watts: float | None = None
    errors: int | None = None
    """Uncorrected, since the driver was loaded; None where error correction is off or unknown."""
    slowed_by: tuple[str, ...] = ()
    """Heat or lack of power, as the driver names it; the ordinary power limit is none."""


@dataclass(frozen=True, slots=True)
class DiskSeen:
    """The disk of the output folder."""

    folder: str
    free_bytes: int
    write_bytes_per_s: float | None
    """Written and synced to the disk; None where that failed."""
    problem: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank and its host."""

    rank: int
    local_rank: int
    host: str
    address: str
    """What the host's own name resolves to; empty where it does not."""
    device: str
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    """Variables that steer NCCL, gloo and CUDA, as they are set for this rank."""
    interfaces: Mapping[str, str]
    """Network interfaces and their IPv4 addresses, empty for none."""
    adapters: tuple[str, ...]
    """InfiniBand and RoCE adapters."""
    memory_bytes: int
    memory_free_bytes: int
    shared_memory_bytes: int | None
    """Of /dev/shm."""
    open_files: int
    locked_memory_bytes: int | None
    """None is unlimited."""
    cores: int
    """That this rank may use."""
    gpu: GpuSeen | None = None
    topology: tuple[tuple[str, ...], ...] = ()
    """How each GPU of the host reaches each other one (NV18, PIX, SYS); of a host's first rank alone."""
    disk: DiskSeen | None = None
    """Of a host's first rank alone."""

    def to_json(self) -> str:
        """The text that `seen_from_json` reads."""
        return json.dumps(asdict(self))


def seen_from_json(text: str) -> Seen:
    """What a rank has told."""
    said = json.loads(text)
    gpu, disk = said.pop("gpu"), said.pop("disk")
    if gpu is not None:
        gpu["slowed_by"] = tuple(gpu["slowed_by"])
    said["adapters"] = tuple(said["adapters"])
    said["topology"] = tuple(tuple(row) for row in said["topology"])
    return Seen(**said, gpu=gpu and GpuSeen(**gpu), disk=disk and DiskSeen(**disk))


def by_host(seen: Sequence[Seen]) -> dict[str, list[Seen]]:
    """Ranks of each host, hosts in the order of their first rank."""
    hosts: dict[str, list[Seen]] = {}
    for one in seen:
        hosts.setdefault(one.host, []).append(one)
    return hosts

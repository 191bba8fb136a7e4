"""Reads what a rank can see of its host, its GPU and its settings. Nothing is changed; one file comes and goes."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

import triweave
from triweave.doctor.seen import DiskSeen, GpuSeen, Seen
from triweave.probe.identity import asked_of_driver, number_in
from triweave.training.process import Process

WRITTEN_BYTES = 32 * 2**20
STEERING = re.compile(r"NCCL_|GLOO_|TORCH_NCCL_|CUDA_VISIBLE_DEVICES$|CUDA_DEVICE_MAX_CONNECTIONS$|OMP_NUM_THREADS$")
NCCL_FILE = Path("/etc/nccl.conf")

SLOWED = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of the driver's reasons for a lower clock (nvmlClocksEventReasons). The power cap, 0x04, is how a card works."""


def look(process: Process, device: torch.device, folder: Path) -> Seen:
    """Everything that is read of this rank; its host's first rank also asks for the topology and tries the disk."""
    first = process.local_rank == 0
    host = socket.gethostname()
    memory, free = _host_memory()
    return Seen(
        rank=process.rank,
        local_rank=process.local_rank,
        host=host,
        address=_address_of(host),
        device=str(device),
        versions=_versions(device),
        settings=_settings(os.environ),
        interfaces={name: _ipv4(name) for _, name in socket.if_nameindex()},
        adapters=_names(Path("/sys/class/infiniband")),
        memory_bytes=memory,
        memory_free_bytes=free,
        shared_memory_bytes=_free_bytes(Path("/dev/shm")),  # noqa: S108 (its size is asked, nothing is written)
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory_bytes=_limit(resource.RLIMIT_MEMLOCK),
        cores=len(os.sched_getaffinity(0)),
        gpu=look_at_gpu(device),
        topology=_topology() if first and device.type == "cuda" else (),
        disk=try_disk(folder) if first else None,
    )


def look_at_gpu(device: torch.device) -> GpuSeen | None:
    """What torch and nvidia-smi say of a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # By its address on the bus: nvidia-smi numbers all cards of the host, torch those that it may see.
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"\d+(,\d+)*", visible):
        index = int(visible.split(",")[index])
    figures = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", "ecc.errors.uncorrected.volatile.total")
    clock, highest, degrees, watts, errors = map(number_in, asked_of_driver(index, figures))
    # Named so since driver 535; the older name has gone with some that came after.
    reasons = "".join(asked_of_driver(index, ("clocks_event_reasons.active",)))
    reasons = reasons or "".join(asked_of_driver(index, ("clocks_throttle_reasons.active",)))
    return GpuSeen(
        torch.cuda.get_device_name(device),
        total,
        free,
        clock,
        highest,
        degrees,
        watts,
        None if errors is None else int(errors),
        slowed_by(reasons),
    )


def slowed_by(reasons: str) -> tuple[str, ...]:
    """What holds a clock down and should not, from the driver's bits.

    >>> slowed_by("0x0000000000000004"), slowed_by("0x0000000000000060"), slowed_by("[N/A]")
    ((), ('heat', 'heat (hardware)'), ())
    """
    try:
        bits = int(reasons, 16)
    except ValueError:
        return ()
    return tuple(name for bit, name in SLOWED.items() if bits & bit)


def parse_topology(text: str) -> tuple[tuple[str, ...], ...]:
    """The rows and columns of GPUs in what `nvidia-smi topo -m` prints."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    found = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    return tuple(tuple(row[1 : 1 + len(found)]) for row in found)


def try_disk(folder: Path, size: int = WRITTEN_BYTES) -> DiskSeen:
    """Write a file where the run will write, have it on the disk, and take it away again."""
    there = next((path for path in (folder, *folder.resolve().parents) if path.is_dir()), Path("/"))
    free = _free_bytes(there) or 0
    file = there / f".triweave-doctor-{socket.gethostname()}-{os.getpid()}"
    block = os.urandom(2**20)  # disks and file systems that compress are not to
    begin = time.perf_counter()
    try:
        with file.open("wb") as out:
            for _ in range(size // len(block)):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        return DiskSeen(str(folder), free, size / (time.perf_counter() - begin))
    except OSError as error:
        return DiskSeen(str(folder), free, None, f"{size >> 20} MiB cannot be written ({error.strerror})")
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _versions(device: torch.device) -> dict[str, str]:
    found = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "triweave": triweave.__version__,
        "CUDA": torch.version.cuda or "",
    }
    if device.type == "cuda":
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        (found["driver"],) = asked_of_driver(device.index or 0, ("driver_version",))
    return {name: version for name, version in found.items() if version}


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the environment, over those of the site's file."""
    found = {}
    with suppress(OSError):
        for line in NCCL_FILE.read_text(encoding="utf-8").splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found[name.strip()] = value.strip()
    return found | {name: value for name, value in environ.items() if STEERING.match(name)}


def _address_of(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _ipv4(interface: str) -> str:
    """The address that the kernel has for an interface (SIOCGIFADDR, netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, 0x8915, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _host_memory() -> tuple[int, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    total, free = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return total, free


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def _topology() -> tuple[tuple[str, ...], ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        done = subprocess.run((tool, "topo", "-m"), capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_topology(done.stdout)

"""What is wrong with what the ranks see, before anything is measured between them."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence

from triweave.cluster import GIB
from triweave.doctor.findings import Finding, spell_ranks
from triweave.doctor.seen import Seen, by_host
from triweave.doctor.wanted import Wanted
from triweave.probe.identity import catalogue_name

FREE_SHARE = 0.95
"""Of a card's memory that is free beside this rank's own context, if nobody else is on it."""
LEAST_FREE_BYTES = 2 * GIB
"""Disk and host memory that any run takes."""
LEAST_SHARED_BYTES = GIB // 2
SLOW_DISK = 50e6
"""Bytes a second: a 70B checkpoint of 1 TB then takes over five hours."""
LEAST_OPEN_FILES = 1024
LEAST_LOCKED_BYTES = 64 * 2**20
"""That an adapter's queues take; the usual default of 8 MiB is not enough."""


def judge(seen: Sequence[Seen], wanted: Wanted) -> list[Finding]:
    """Everything that is wrong with what was seen, the most telling first."""
    return [
        *_versions(seen),
        *_interfaces(seen),
        *_places(seen, wanted),
        *_gpus(seen, wanted),
        *_disks(seen, wanted),
        *_limits(seen),
    ]


def _odd(seen: Sequence[Seen], value: Callable[[Seen], str]) -> Iterator[tuple[list[Seen], str, str]]:
    """Ranks whose value is not that of most: they, their value, the usual one."""
    values = [value(one) for one in seen]
    usual = max(values, key=values.count)
    for odd in dict.fromkeys(values):
        if odd != usual:
            yield [one for one, its in zip(seen, values, strict=True) if its == odd], odd, usual


def place(ranks: Sequence[Seen]) -> str:
    """`rank 3 on h2`, `ranks 4-7 on h2, h3`."""
    return f"{spell_ranks([one.rank for one in ranks])} on {', '.join(by_host(ranks))}"


def _versions(seen: Sequence[Seen]) -> Iterator[Finding]:
    for name in dict.fromkeys(name for one in seen for name in one.versions):
        for ranks, odd, usual in _odd(seen, lambda one, name=name: one.versions.get(name, "missing")):  # type: ignore[misc]
            yield Finding("different-versions", place(ranks), f"{name} is {odd}, and {usual} on most ranks")


def _interfaces(seen: Sequence[Seen]) -> Iterator[Finding]:
    several = len(by_host(seen)) > 1
    for one in _first_ranks(seen):
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            value = one.settings.get(variable)
            if value is None:
                continue
            chosen = chosen_interfaces(value, one.interfaces, exact=variable.startswith("GLOO"))
            have = ", ".join(f"{name} {address}".strip() for name, address in one.interfaces.items())
            if not chosen:
                yield Finding("wrong-interface", one.host, f"{variable}={value} names none of {have}")
            elif several and all(_is_loopback(one.interfaces[name]) for name in chosen):
                yield Finding(
                    "wrong-interface", one.host, f"{variable}={value} is the loopback, which no other host reaches"
                )
        adapters = one.settings.get("NCCL_IB_HCA", "")
        if adapters and one.adapters and not _chosen_adapters(adapters, one.adapters):
            what = f"NCCL_IB_HCA={adapters} names none of {', '.join(one.adapters)}"
            yield Finding("wrong-interface", one.host, what)
        gloo_resolves = one.device == "cpu" and "GLOO_SOCKET_IFNAME" not in one.settings
        if several and gloo_resolves and (not one.address or _is_loopback(one.address)):
            yield Finding(
                "loopback-address", one.host, f"its name resolves to {one.address or 'nothing'}, and gloo listens there"
            )


def chosen_interfaces(value: str, interfaces: Mapping[str, str], *, exact: bool) -> list[str]:
    """The interfaces with an address that a variable chooses.

    gloo takes exact names; NCCL prefixes, `=` before exact names and `^` before those that are not to be taken
    (NCCL's documentation of NCCL_SOCKET_IFNAME).
    """
    have = [name for name, address in interfaces.items() if address]
    if exact:
        return [name for name in have if name in value.split(",")]
    sign = value[0] if value[:1] in ("=", "^") else ""
    rest = value.removeprefix("^").removeprefix("=")
    words = [word for word in rest.split(",") if word]
    if "=" in value[:2]:
        matches = [name for name in have if name in words]
    else:
        matches = [name for name in have if name.startswith(tuple(words))]
    return [name for name in have if name not in matches] if sign == "^" else matches


def _chosen_adapters(value: str, adapters: Sequence[str]) -> list[str]:
    # A word may go on with `:port`.
    words = ",".join(word.partition(":")[0] for word in value.split(","))
    return chosen_interfaces(words, dict.fromkeys(adapters, "there"), exact=False)


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def _places(seen: Sequence[Seen], wanted: Wanted) -> Iterator[Finding]:
    hosts = by_host(seen)
    for host, ranks in hosts.items():
        numbers = [one.rank for one in ranks]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            yield Finding("rank-order", host, f"has {spell_ranks(numbers)}, which are not neighbours")
    layout, cluster = wanted.layout, wanted.cluster
    if cluster is not None and (len(hosts), len(seen)) != (cluster.num_nodes, cluster.world_size):
        found = f"{len(hosts)} hosts with {len(seen)} ranks"
        told = f"{cluster.num_nodes} nodes with {cluster.world_size}"
        yield Finding("other-cluster", "the job", f"there are {found}; the run's cluster, {cluster}, has {told}")
    if layout is None:
        return
    if layout.world_size != len(seen):
        if cluster is None:
            what = f"there are {len(seen)} ranks; the run's layout, {layout}, has {layout.world_size}"
            yield Finding("other-cluster", "the job", what)
        return
    host_of = {one.rank: one.host for one in seen}
    crossing = [group for group in layout.groups("tp") if len({host_of[rank] for rank in group}) > 1]
    if crossing:
        on = ", ".join(dict.fromkeys(host_of[rank] for rank in crossing[0]))
        more = f", and {len(crossing) - 1} more groups" if len(crossing) > 1 else ""
        most = max(len(ranks) for ranks in hosts.values())
        what = f"the tensor-parallel group of {layout.tp} is on {on}; a host has {most} ranks"
        yield Finding("tp-across-hosts", spell_ranks(crossing[0]) + more, what)


def _gpus(seen: Sequence[Seen], wanted: Wanted) -> Iterator[Finding]:
    for ranks, odd, usual in _odd(seen, lambda one: one.gpu.model if one.gpu else "no GPU"):
        yield Finding("different-gpus", place(ranks), f"has {odd}, and most ranks have {usual}")
    cards = [(one, one.gpu) for one in seen if one.gpu is not None]
    if cards and wanted.cluster is not None:
        one, gpu = cards[0]
        known = catalogue_name(gpu.model, gpu.total_bytes)
        if known is not None and known != wanted.cluster.gpu.name:
            yield Finding("other-cluster", "the job", f"the GPUs are {known}; the run's cluster is {wanted.cluster}")
    for one, gpu in cards:
        if gpu.free_bytes < FREE_SHARE * gpu.total_bytes:
            free, total = gpu.free_bytes / GIB, gpu.total_bytes / GIB
            yield Finding("gpu-memory-taken", place([one]), f"{free:.1f} of {total:.1f} GiB are free before a run")
        if gpu.slowed_by:
            clock = "" if gpu.clock_mhz is None else f", at {gpu.clock_mhz:.0f} MHz"
            yield Finding("gpu-slowed", place([one]), f"its clock is held down by {', '.join(gpu.slowed_by)}{clock}")
        if gpu.errors:
            yield Finding("gpu-errors", place([one]), f"{gpu.errors} uncorrected memory errors")
    for one in seen:
        links = [word for row in one.topology for word in row if word.startswith("NV")]
        usual = max(links, key=links.count, default="")
        fewer = [
            f"{word} between GPU {index} and {peer}"
            for index, row in enumerate(one.topology)
            for peer, word in enumerate(row)
            if index < peer and word != usual
        ]
        if usual and fewer:
            yield Finding("gpu-links", one.host, f"{', '.join(fewer)}; other pairs have {usual}")


def _disks(seen: Sequence[Seen], wanted: Wanted) -> Iterator[Finding]:
    needed = max(wanted.saved_bytes, LEAST_FREE_BYTES)
    for one in seen:
        disk = one.disk
        if disk is None:
            continue
        if disk.problem:
            yield Finding("disk-full", one.host, f"{disk.folder}: {disk.problem}")
        elif disk.free_bytes < needed:
            what = "what the run keeps takes about" if wanted.saved_bytes > LEAST_FREE_BYTES else "any run takes"
            free = f"{disk.free_bytes / GIB:.1f} GiB are free"
            yield Finding("disk-full", one.host, f"{disk.folder}: {free}; {what} {needed / GIB:.1f}")
        elif disk.write_bytes_per_s is not None and disk.write_bytes_per_s < SLOW_DISK:
            rate, least = disk.write_bytes_per_s / 1e6, SLOW_DISK / 1e6
            yield Finding("disk-slow", one.host, f"{disk.folder}: {rate:.0f} MB/s written, below {least:.0f}")


def _limits(seen: Sequence[Seen]) -> Iterator[Finding]:
    for one in _first_ranks(seen):
        if one.memory_free_bytes < LEAST_FREE_BYTES:
            free, total = one.memory_free_bytes / GIB, one.memory_bytes / GIB
            yield Finding("host-memory-low", one.host, f"{free:.1f} of {total:.0f} GiB of host memory are free")
        if one.open_files < LEAST_OPEN_FILES:
            yield Finding("few-open-files", one.host, f"{one.open_files} files may be open, below {LEAST_OPEN_FILES}")
        if one.gpu is None:
            continue
        if one.shared_memory_bytes is not None and one.shared_memory_bytes < LEAST_SHARED_BYTES:
            have, least = one.shared_memory_bytes >> 20, LEAST_SHARED_BYTES >> 20
            yield Finding("small-shm", one.host, f"{have} MiB of shared memory are free, below {least}")
        if one.adapters and one.locked_memory_bytes is not None and one.locked_memory_bytes < LEAST_LOCKED_BYTES:
            have, least = one.locked_memory_bytes >> 10, LEAST_LOCKED_BYTES >> 10
            yield Finding("locked-memory", one.host, f"{have} KiB may be locked, below {least} that RDMA takes")
        ranks = len(by_host(seen)[one.host])
        if one.cores < 2 * ranks:
            yield Finding("few-cores", one.host, f"{ranks} ranks share {one.cores} cores, below 2 for each")


def _first_ranks(seen: Sequence[Seen]) -> list[Seen]:
    return [ranks[0] for ranks in by_host(seen).values()]

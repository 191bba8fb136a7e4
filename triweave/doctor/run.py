"""One rank of a doctor's visit: see, compare, and only then make process groups and measure.

Everything goes through the store at which the ranks meet, as JSON: it works between ranks that have nothing else in
common, and says which of them is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from triweave.config.schema import RuntimeConfig
from triweave.doctor.findings import FATAL, Finding, spell_ranks
from triweave.doctor.judge import judge, place
from triweave.doctor.judge_measured import judge_clocks, judge_groups, judge_links, judge_ranks
from triweave.doctor.look import look, look_at_gpu
from triweave.doctor.measure import Between, measure_alone, measure_clock, measure_group, measure_pairs
from triweave.doctor.seen import Seen, by_host, seen_from_json
from triweave.doctor.wanted import Wanted
from triweave.groups import Group
from triweave.layout import AXES
from triweave.planner.profile import Profile
from triweave.probe.session import Session
from triweave.recovery.agreement import exchange, settled
from triweave.training.process import Process
from triweave.training.processes import choose_device, meet, process_group


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for."""

    folder: Path
    """Whose disk is tried."""
    device: str = "auto"
    wanted: Wanted = field(default_factory=Wanted)
    profile: Profile | None = None
    timeout_s: float = 120.0
    """In which ranks must come, and a collective must end."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a visit has found; on rank 0."""

    seen: tuple[Seen, ...]
    findings: tuple[Finding, ...]
    groups: tuple[Between, ...] = ()
    links: tuple[Between, ...] = ()
    alone_s: dict[int, float] = field(default_factory=dict)
    """Seconds of the same work, by rank."""
    ahead: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds by which a host's clock is ahead of the first one's, and how far that may be wrong."""
    unmeasured: str = ""
    """Why nothing was measured between ranks; empty where it was."""
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Measured:
    """What one rank has measured."""

    groups: list[Between]
    links: list[Between]
    alone_s: float
    slowed_by: list[str]
    """What held the GPU's clock down while it worked."""
    failure: str = ""


def visit(
    options: Options,
    tell: Callable[[Report], None],
    process: Process,
    clock: Callable[[], float] = time.time,
    work: Callable[[], object] | None = None,
) -> int:
    """Examine this rank's part of the job; rank 0 tells the report. Returns 0, or 1 if something is wrong.

    Args:
        options: what the command line asks for.
        tell: what rank 0 does with the report.
        process: this rank.
        clock: this host's, in seconds since the epoch.
        work: what is timed on each rank alone; None takes a product.

    Raises:
        RunFailed: a rank has not come.
        InputError: there are fewer GPUs than ranks and GPUs were asked for.
    """
    begun = time.monotonic()
    device = choose_device(RuntimeConfig(device=options.device), process)  # type: ignore[arg-type]
    # Before they meet: ranks of one host then get settings of ours.
    mine = look(process, device, options.folder)
    store = meet(process, options.timeout_s)
    seen = [seen_from_json(text) for text in _everybodys(store, "seen", process, mine.to_json(), options.timeout_s)]
    # Every rank judges alike, from the same values: nobody waits to be told whether to go on.
    findings = judge(seen, options.wanted)
    fatal = sorted({finding.kind for finding in findings if finding.kind in FATAL})
    firsts = [ranks[0].rank for ranks in by_host(seen).values()]
    ahead = {} if store is None else measure_clock(store, process.rank, firsts[1:], clock)
    host_of = {one.rank: one.host for one in seen}
    report = Report(tuple(seen), tuple(findings), ahead={host_of[rank]: skew for rank, skew in ahead.items()})
    if fatal:
        report = replace(report, unmeasured=f"{', '.join(fatal)}: process groups would fail or hang")
        return _end(report, begun, tell, store, process, options)
    measured = _measure(options, process, device, store, seen, work)
    told = _everybodys(store, "measured", process, json.dumps(asdict(measured)), options.timeout_s * 2)
    every = [json.loads(text) for text in told]
    return _end(_with(report, every, options, device.type == "cuda"), begun, tell, store, process, options)


def _measure(
    options: Options,
    process: Process,
    device: torch.device,
    store: Store | None,
    seen: Sequence[Seen],
    work: Callable[[], object] | None,
) -> _Measured:
    """Make the groups and measure; what fails is a finding and no error."""
    found = _Measured([], [], 0.0, [])
    doing = "making the process group of all ranks"
    try:
        with process_group(process, device, options.timeout_s, store):
            world = Group(tuple(range(process.world_size)), process.rank, _world(process))
            session = Session(world, device, small=True)
            doing = "working alone"
            found = replace(found, alone_s=measure_alone(session, work))
            if gpu := look_at_gpu(device):
                found.slowed_by.extend(gpu.slowed_by)
            for kind, rows in groups_of(options.wanted, seen):
                doing = f"an all-reduce over the {kind} groups"
                group = _made(rows, process, options.timeout_s)
                session.meet()
                if group.size > 1:
                    measured = measure_group(session, kind, group)
                    found.groups.extend([measured] if group.rank == 0 else [])
            doing = "messages between pairs of ranks"
            hosts = [[one.rank for one in ranks] for ranks in by_host(seen).values()]
            found.links.extend(measure_pairs(session, hosts))
    except RuntimeError as error:
        return replace(found, failure=f"{doing}: {str(error).splitlines()[0][:200]}")
    return found


def groups_of(wanted: Wanted, seen: Sequence[Seen]) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """The groups to measure: those of the layout, or each host's ranks and one rank of every host; then all ranks."""
    every = tuple(one.rank for one in seen)
    layout = wanted.layout
    if layout is not None and layout.world_size == len(seen):
        named = {str(axis): layout.groups(axis) for axis in AXES}
        if layout.uses_shard_groups:
            # Over all of these ranks nothing is reduced.
            del named["dp"]
            named |= {"shards": layout.shard_groups(), "across": layout.replica_groups()}
        elif layout.cp > 1:
            # What the ranks of both axes do together; over dp alone nothing is sent then.
            named["dp"] = layout.same_weights_groups()
        yield from ((kind, rows) for kind, rows in named.items() if len(rows[0]) > 1)
    else:
        hosts = [tuple(one.rank for one in ranks) for ranks in by_host(seen).values()]
        yield "host", [ranks for ranks in hosts if len(ranks) > 1]
        if len(hosts) > 1:
            yield "hosts", [tuple(ranks[0] for ranks in hosts)]
    yield "world", [every] if len(every) > 1 else []


def _world(process: Process) -> dist.ProcessGroup | None:
    return dist.group.WORLD if process.world_size > 1 else None


def _made(rows: Sequence[tuple[int, ...]], process: Process, timeout_s: float) -> Group:
    """The group of `rows` that holds this rank; all ranks make all of them, in one order."""
    mine = Group((process.rank,), 0)
    for ranks in rows:
        handle = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
        if process.rank in ranks:
            mine = Group(ranks, ranks.index(process.rank), handle)
    return mine


def _with(report: Report, every: Sequence[dict[str, Any]], options: Options, on_gpu: bool) -> Report:
    """The report with what the ranks have measured, and what is wrong with it."""
    seen, findings = report.seen, list(report.findings)
    failures: dict[str, list[int]] = {}
    for rank, its in enumerate(every):
        if its["failure"]:
            failures.setdefault(its["failure"], []).append(rank)
    findings += [Finding("group-failed", spell_ranks(ranks), what) for what, ranks in failures.items()]
    slowed = {finding.where for finding in findings if finding.kind == "gpu-slowed"}
    for one, its in zip(seen, every, strict=True):
        where = place([one])
        if its["slowed_by"] and where not in slowed:
            findings.append(Finding("gpu-slowed", where, f"at work its clock is held down by {its['slowed_by'][0]}"))
    groups, links = (
        [Between(**{**found, "ranks": tuple(found["ranks"])}) for its in every for found in its[key]]
        for key in ("groups", "links")
    )
    alone_s = {rank: its["alone_s"] for rank, its in enumerate(every)}
    if all(alone_s.values()):
        findings += judge_ranks(alone_s, seen, on_gpu=on_gpu)
    findings += judge_links(links, seen, on_gpu=on_gpu, profile=options.profile)
    findings += judge_groups(groups, seen, on_gpu=on_gpu, profile=options.profile)
    return replace(report, findings=tuple(findings), groups=tuple(groups), links=tuple(links), alone_s=alone_s)


def _end(
    report: Report,
    begun: float,
    tell: Callable[[Report], None],
    store: Store | None,
    process: Process,
    options: Options,
) -> int:
    """Tell the report on rank 0; all ranks leave with the same code, and none before it is told."""
    key = "doctor/verdict"
    if process.rank == 0:
        findings = (*report.findings, *judge_clocks(report.ahead))
        tell(replace(report, findings=findings, took_s=time.monotonic() - begun))
        if store is not None:
            store.set(key, str(int(bool(findings))))
            # Rank 0 may keep the store: it goes last.
            keys = [f"{key}/{rank}" for rank in range(1, process.world_size)]
            store.wait(keys, timedelta(seconds=options.timeout_s))
        return int(bool(findings))
    if store is None:
        return 0
    store.wait([key], timedelta(seconds=options.timeout_s))
    code = int(store.get(key))
    store.set(f"{key}/{process.rank}", "")
    return code


def _everybodys(store: Store | None, what: str, process: Process, mine: str, timeout_s: float) -> list[str]:
    """What each rank gives, by rank, on all of them."""
    if store is None:
        return [mine]
    key = f"doctor/{what}"
    texts = exchange(store, key, process.rank, process.world_size, mine, timeout_s)
    found: list[str] = json.loads(settled(store, key, process.rank, json.dumps(texts), timeout_s))
    return found

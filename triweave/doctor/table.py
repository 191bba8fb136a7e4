"""What a visit has found, for a person in ten seconds and for a program."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from triweave.cluster import GIB
from triweave.doctor.findings import spell_ranks
from triweave.doctor.measure import Between
from triweave.doctor.run import Report
from triweave.doctor.seen import Seen, by_host

MOST_HOSTS = 16
"""That have a line each; of more only those with a finding."""


def to_json(report: Report) -> dict[str, Any]:
    """The whole of it."""
    findings = [{**asdict(one), "cure": one.cure} for one in report.findings]
    return {**asdict(report), "healthy": not findings, "findings": findings}


def to_text(report: Report) -> Iterator[str]:
    """The job, a line a host, a line a kind of link, what is wrong, and the verdict last."""
    hosts = by_host(report.seen)
    first = report.seen[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    yield f"job       {_count(len(report.seen), 'rank')} on {_count(len(hosts), 'host')}; rank 0 has {versions}"
    if first.gpu is None:
        yield "gpus      none here: what follows is of processors and gloo"
    yield from _hosts(report, hosts)
    yield from _settings(report.seen)
    yield from _topologies(hosts)
    for kind in dict.fromkeys(one.kind for one in report.groups):
        yield _line(f"{kind} group", [one for one in report.groups if one.kind == kind], "all-reduce")
    for kind, name in (("within", "in a host"), ("across", "over hosts")):
        if links := [one for one in report.links if one.kind == kind]:
            yield _line(name, links, "messages")
    if report.alone_s and all(report.alone_s.values()):
        usual = statistics.median_low(report.alone_s.values())
        slowest = max(report.alone_s, key=lambda rank: report.alone_s[rank])
        off = 100 * (report.alone_s[slowest] / usual - 1)
        yield f"alone     slowest rank {slowest}, {off:.0f} % beyond the median"
    if report.unmeasured:
        yield f"unmeasured {report.unmeasured}"
    for finding in report.findings:
        yield f"WRONG     {finding.kind}: {finding.where}: {finding.what}"
        yield f"          cure: {finding.cure}"
    count = len(report.findings)
    verdict = "nothing is wrong" if not count else f"{_count(count, 'thing')} to cure"
    yield f"verdict   {verdict}; {report.took_s:.1f} s"


def _hosts(report: Report, hosts: dict[str, list[Seen]]) -> Iterator[str]:
    shown = dict(hosts)
    if len(hosts) > MOST_HOSTS:
        named = {word for finding in report.findings for word in re.split(r"[\s,]+", finding.where)}
        shown = {host: ranks for number, (host, ranks) in enumerate(hosts.items()) if number == 0 or host in named}
    for host, ranks in shown.items():
        first, disk = ranks[0], ranks[0].disk
        parts = [_gpus(ranks)] if first.gpu is not None else [_count(first.cores, "core")]
        parts.append(f"{first.memory_free_bytes / GIB:.0f}/{first.memory_bytes / GIB:.0f} GiB of memory free")
        if disk is not None:
            rate = "" if disk.write_bytes_per_s is None else f", writes {disk.write_bytes_per_s / 1e6:,.0f} MB/s"
            parts.append(f"disk {disk.free_bytes / GIB:,.0f} GiB free{rate}")
        if host in report.ahead:
            parts.append(f"clock {1e3 * report.ahead[host][0]:+.0f} ms")
        yield f"{host:9} {spell_ranks([one.rank for one in ranks])}: {'; '.join(parts)}"
    if len(shown) < len(hosts):
        yield f"          and {len(hosts) - len(shown)} hosts without a finding"


def _gpus(ranks: Sequence[Seen]) -> str:
    cards = [one.gpu for one in ranks if one.gpu is not None]
    free = min(card.free_bytes for card in cards) / GIB
    text = f"{len(cards)} x {cards[0].model}, {free:.0f}/{cards[0].total_bytes / GIB:.0f} GiB free"
    clocks = [card.max_clock_mhz for card in cards if card.max_clock_mhz is not None]
    degrees = [card.degrees for card in cards if card.degrees is not None]
    errors = [card.errors for card in cards if card.errors is not None]
    text += f", to {min(clocks):.0f} MHz" if clocks else ", clocks not told"
    text += f", {max(degrees):.0f} C" if degrees else ""
    return text + (f", {sum(errors)} ECC errors" if errors else ", ECC not told")


def _settings(seen: Sequence[Seen]) -> Iterator[str]:
    """What steers NCCL and gloo, once where all ranks have the same."""
    shown: dict[str, list[int]] = {}
    for one in seen:
        words = [f"{name}={value}" for name, value in sorted(one.settings.items()) if name != "CUDA_VISIBLE_DEVICES"]
        shown.setdefault(" ".join(words), []).append(one.rank)
    for text, ranks in shown.items():
        if text:
            yield f"settings  {'all ranks' if len(shown) == 1 else spell_ranks(ranks)}: {text}"
    addresses = {
        host: [f"{name} {address}" for name, address in ranks[0].interfaces.items() if address]
        for host, ranks in by_host(seen).items()
    }
    adapters = ", ".join(seen[0].adapters) or "no InfiniBand"
    yield f"network   {seen[0].host} has {', '.join(addresses[seen[0].host]) or 'no address'}; {adapters}"


def _topologies(hosts: dict[str, list[Seen]]) -> Iterator[str]:
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for host, ranks in hosts.items():
        alike.setdefault(ranks[0].topology, []).append(host)
    for rows, names in alike.items():
        words = [word for number, row in enumerate(rows) for word in row[number + 1 :]]
        counts = ", ".join(f"{words.count(word)} pairs {word}" for word in dict.fromkeys(words))
        if counts:
            yield f"links     {', '.join(names[:4])}{' and others' * (len(names) > 4)}: {counts}"


def _line(name: str, every: Sequence[Between], what: str) -> str:
    rates = [one.bytes_per_s for one in every]
    worst = min(every, key=lambda one: one.bytes_per_s)
    latency = max(one.latency_s for one in every)
    slowest = f"; slowest {spell_ranks(worst.ranks)} {worst.bytes_per_s / 1e6:,.0f}" if len(every) > 1 else ""
    return f"{name:9} {what} {statistics.median(rates) / 1e6:,.0f} MB/s{slowest}; latency {1e6 * latency:,.0f} us"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"

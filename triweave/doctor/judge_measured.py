"""What is wrong with what was measured: against a profile where there is one, and always against each other."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from triweave.doctor.findings import Finding, spell_ranks
from triweave.doctor.measure import Between
from triweave.doctor.seen import Seen
from triweave.planner.machine import Curve
from triweave.planner.profile import Profile

SLOW_SHARE = {True: 0.7, False: 0.25}
"""Of the median of its kind below which a link is slow, with NCCL and with gloo. One of two ports lost is 0.5; gloo's
links on shared cores differ by 2 or 3 with nothing wrong."""
SLOWER_RANK = {True: 1.07, False: 1.12}
"""Times the median that a rank may take, on a GPU and on a CPU. Cards of one kind differ by 3 % and more under load."""
MOST_SKEW_S = 0.5


def judge_links(
    links: Sequence[Between], seen: Sequence[Seen], *, on_gpu: bool, profile: Profile | None = None
) -> Iterator[Finding]:
    """Links that are slow: one finding a host where all of its links are, one a pair otherwise."""
    for kind in ("within", "across"):
        every = [link for link in links if link.kind == kind]
        usual = usual_rate(every)
        expected = _link_of(profile, kind, every[0].size_bytes) if every else None
        floor = SLOW_SHARE[on_gpu] * (expected or usual)
        against = "the profile says" if expected else "the median is"
        slow = [link for link in every if link.at_most_bytes_per_s < floor]
        for name, ones in _by_cause(slow, every, {one.rank: one.host for one in seen}):
            worst = min(ones, key=lambda link: link.bytes_per_s)
            where = "between hosts" if kind == "across" else "within a host"
            rate, median = worst.bytes_per_s / 1e6, (expected or usual) / 1e6
            pair = f"rank {worst.ranks[0]} to rank {worst.ranks[1]}"
            more = f", the slowest of {len(ones)} slow ones" if len(ones) > 1 else ""
            what = f"{rate:,.1f} MB/s from {pair}{more}; {against} {median:,.1f} {where}"
            yield Finding("slow-link", name, what)


def usual_rate(links: Sequence[Between]) -> float:
    """The median; of two links the faster, for one of them may be the fault."""
    rates = sorted(link.bytes_per_s for link in links)
    return rates[len(rates) // 2] if rates else 0.0


def _by_cause(
    slow: Sequence[Between], every: Sequence[Between], host_of: Mapping[int, str]
) -> Iterator[tuple[str, list[Between]]]:
    """Slow links, together where one host sends or receives every one of its links slowly."""
    left = list(slow)
    for direction, way in ((0, "sends"), (1, "receives")):
        for host in dict.fromkeys(host_of[link.ranks[direction]] for link in slow):
            of_host = [link for link in every if host_of[link.ranks[direction]] == host]
            together = [link for link in left if link in of_host]
            peers = {host_of[link.ranks[1 - direction]] for link in of_host}
            if len(peers) > 1 and together == of_host:
                yield f"{host}, all that it {way}", together
                left = [link for link in left if link not in together]
    for link in left:
        yield " to ".join(f"rank {rank} on {host_of[rank]}" for rank in link.ranks), [link]


def _link_of(profile: Profile | None, kind: str, size: int) -> float | None:
    span = {"within": "node", "across": "cluster"}[kind]
    for link in profile.point_to_point if profile is not None else ():
        if link.span == span:
            sizes, seconds = zip(*link.bytes_seconds, strict=True)
            return size / Curve(sizes, seconds)(size)
    return None


def judge_groups(
    groups: Sequence[Between], seen: Sequence[Seen], *, on_gpu: bool, profile: Profile | None = None
) -> Iterator[Finding]:
    """Process groups that are slower than their like, or than the profile's all-reduce inside a node."""
    host_of = {one.rank: one.host for one in seen}
    for kind in dict.fromkeys(group.kind for group in groups):
        alike = [group for group in groups if group.kind == kind]
        for group in alike:
            is_inside = len({host_of[rank] for rank in group.ranks}) == 1
            expected = _all_reduce_of(profile, len(group.ranks), group.size_bytes) if is_inside else None
            usual = expected or usual_rate(alike)
            if group.at_most_bytes_per_s < SLOW_SHARE[on_gpu] * usual:
                against = "the profile says" if expected else f"the median of {kind} groups is"
                rate, other = group.bytes_per_s / 1e6, usual / 1e6
                name = f"{kind} group, {spell_ranks(group.ranks)}"
                yield Finding("slow-group", name, f"all-reduce at {rate:,.1f} MB/s on the bus; {against} {other:,.1f}")


def _all_reduce_of(profile: Profile | None, ranks: int, size: int) -> float | None:
    for curve in profile.collectives if profile is not None else ():
        if (curve.kind, curve.ranks, curve.span) == ("all_reduce", ranks, "node"):
            sizes, seconds = zip(*curve.bytes_seconds, strict=True)
            return size * 2 * (ranks - 1) / ranks / Curve(sizes, seconds)(size)
    return None


def judge_ranks(alone_s: Mapping[int, float], seen: Sequence[Seen], *, on_gpu: bool) -> Iterator[Finding]:
    """Ranks that take longer than the others for the same work."""
    usual = statistics.median_low(alone_s.values())
    for one in seen:
        slower = alone_s[one.rank] / usual - 1
        if slower > SLOWER_RANK[on_gpu] - 1:
            what = f"takes {100 * slower:.0f} % longer than most for the same work"
            yield Finding("slow-rank", f"rank {one.rank} on {one.host}", what)


def judge_clocks(ahead: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Hosts whose clock is not the first host's, beyond what the measurement can tell."""
    for host, (skew_s, doubt_s) in ahead.items():
        if abs(skew_s) - doubt_s > MOST_SKEW_S:
            way = "ahead of" if skew_s > 0 else "behind"
            what = f"its clock is {abs(skew_s):.2f} s {way} the first host's (to {doubt_s:.2f} s)"
            yield Finding("clock-skew", host, what)

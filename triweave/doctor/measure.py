"""Measures what ranks do alone and between each other: small, the best of a few, so that a busy host is no slow one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from triweave.groups import Group
from triweave.probe.session import Session

REPEATS = 5
PASSES = {True: 1, False: 3}
"""Over all pairs, with NCCL and with gloo: what else a busy host does in one of them, it does not do in all."""
ENOUGH_S = 0.5
"""For one size over one link."""
MOST_ROUNDS = 15
"""In which hosts meet each other; a larger job's hosts meet so many others each."""
ALONE_REPEATS = 60
SETTLE_S = 0.5
"""Of products before one is timed: two H200 that had just been started were 14 % apart after 40 ms."""


@dataclass(frozen=True, slots=True)
class Between:
    """What was measured between ranks: an all-reduce over a group, or messages one way."""

    kind: str
    """`tp`, `dp`, ... for a group; `within` or `across` hosts for two ranks, the sender first."""
    ranks: tuple[int, ...]
    bytes_per_s: float
    """Of an all-reduce, on the bus: bytes / time x 2(n - 1)/n."""
    latency_s: float
    size_bytes: int


def bytes_sent(on_gpu: bool) -> int:
    """Large enough for the bandwidth to show, and on a link of 10 Mbit/s still over in seconds."""
    return 64 * 2**20 if on_gpu else 2 * 2**20


def measure_group(session: Session, kind: str, group: Group) -> Between:
    """An all-reduce over `group`; its ranks call it together. Type: partial -> replicated, of zeros."""
    size = bytes_sent(session.on_gpu)
    whole = torch.zeros(size // 4, device=session.device)

    def best(tensor: torch.Tensor, repeats: int) -> float:
        return min(_seconds(session, lambda: dist.all_reduce(tensor, group=group.handle)) for _ in range(repeats))

    dist.all_reduce(whole, group=group.handle)  # makes the connections
    latency_s = best(whole[:1], 3 * REPEATS)
    bus = size * 2 * (group.size - 1) / group.size
    return Between(kind, group.ranks, bus / best(whole, REPEATS), latency_s, size)


def measure_pairs(session: Session, hosts: Sequence[Sequence[int]]) -> list[Between]:
    """Messages from every rank of a host to each of its neighbours, and to the ranks in its place on other hosts.

    All ranks call it together. Each round pairs everybody with one other: what a round measures, it measures while
    the other pairs talk too, as in training.

    Returns:
        What this rank has sent.
    """
    best: dict[int, Between] = {}
    for kind, pairs in PASSES[session.on_gpu] * list(_rounds(hosts)):
        session.meet()
        for source, destination in pairs:
            for sender, receiver in ((source, destination), (destination, source)):
                if session.group.rank in (sender, receiver):
                    sent = _message(session, kind, sender, receiver)
                    if sent is not None:
                        best[receiver] = max(sent, best.get(receiver, sent), key=lambda one: one.bytes_per_s)
    return list(best.values())


def _rounds(hosts: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    for within in zip(*(tournament(len(ranks)) for ranks in hosts), strict=False):
        together = zip(hosts, within, strict=True)
        yield "within", [(ranks[one], ranks[other]) for ranks, pairs in together for one, other in pairs]
    for number, pairs in enumerate(tournament(len(hosts))):
        if number == MOST_ROUNDS:
            return
        rails = [zip(hosts[one], hosts[other], strict=False) for one, other in pairs]
        yield "across", [pair for rail in rails for pair in rail]


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Rounds in which everybody meets everybody once (the circle method).

    >>> tournament(4)
    [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    """
    seats = list(range(count + count % 2))  # an odd one out meets a number that is nobody
    rounds = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(one, other) for one, other in facing if max(one, other) < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _message(session: Session, kind: str, sender: int, receiver: int) -> Between | None:
    """One way, and a word back by which the sender knows that it has arrived; None on the receiver."""
    size = bytes_sent(session.on_gpu)
    message, word = torch.zeros(size // 4, device=session.device), torch.zeros(1, device=session.device)
    sends = session.group.rank == sender
    times: dict[int, list[float]] = {1: [], message.numel(): []}
    for length, repeats in ((1, 3 * REPEATS), (message.numel(), REPEATS)):
        first = time.monotonic()
        for number in range(repeats + 1):  # the first makes the connection
            begin = time.perf_counter()
            if sends:
                dist.send(message[:length], receiver)
                dist.recv(word, receiver)
            else:
                dist.recv(message[:length], sender)
                # On a slow link a second message is enough: the receiver says so to both.
                word.fill_(float(number > 0 and time.monotonic() - first > ENOUGH_S))
                dist.send(word, sender)
            session.wait()
            times[length].append(time.perf_counter() - begin)
            if word.item():
                break
    if not sends:
        return None
    there_and_back, whole = (min(taken[1:]) for taken in times.values())
    return Between(kind, (sender, receiver), rate_of(size, there_and_back, whole), there_and_back / 2, size)


def rate_of(size: int, there_and_back_s: float, whole_s: float) -> float:
    """Bytes a second of a message, one way.

    Words may have waited behind what another pair sent through a slow link, and the message not, or less: taken off
    whole, they would leave no time for it, and the slowest link would be the fastest. A message takes no less than
    the word that comes back after it.

    Args:
        size: bytes of the message.
        there_and_back_s: a word, and a word back.
        whole_s: the message, and a word back.
    """
    return size / max(whole_s - there_and_back_s / 2, whole_s / 2)


def measure_alone(session: Session, work: Callable[[], object] | None = None) -> float:
    """Seconds of the same work on every rank, all at once: who takes longer has a slower processor.

    On a GPU a large product, again and again until the clock has settled. On a CPU the processor's own time, the best
    of many: what other processes take of it does not count.
    """
    width = 8192 if session.on_gpu else 192
    a, b = (session.random(width, width, dtype=torch.bfloat16 if session.on_gpu else torch.float32) for _ in range(2))
    todo = work or (lambda: a @ b)
    session.meet()
    if session.on_gpu:
        begin = time.perf_counter()
        while time.perf_counter() < begin + SETTLE_S:
            for _ in range(10):
                todo()
            session.wait()
        return _median(session, todo)
    taken = []
    for _ in range(ALONE_REPEATS):
        begin = time.thread_time()
        for _ in range(4):
            todo()
        taken.append(time.thread_time() - begin)
    return min(taken)


def _median(session: Session, todo: Callable[[], object]) -> float:
    """Seconds of a call on this rank alone, by its GPU's clock."""
    marks = [session.mark()]
    for _ in range(ALONE_REPEATS):
        todo()
        marks.append(session.mark())
    session.wait()
    taken = sorted(before.until(after) for before, after in pairwise(marks))
    return taken[len(taken) // 2]


def measure_clock(
    store: Store, rank: int, others: Sequence[int], clock: Callable[[], float] = time.time
) -> dict[int, tuple[float, float]]:
    """How far the clocks of `others` are ahead of rank 0's, which asks them one by one; empty on all but rank 0.

    As NTP does (RFC 5905): half way between question and answer both clocks are read; the true difference is within
    half of the time that both took.

    Returns:
        Of each rank seconds ahead, and seconds by which that may be wrong.
    """
    found = {}
    for other in others:
        best = (0.0, float("inf"))
        for number in range(REPEATS):
            ask, answer = (f"doctor/clock/{other}/{number}/{word}" for word in ("ask", "answer"))
            if rank == 0:
                before = clock()
                store.set(ask, "")
                theirs = float(store.get(answer))
                after = clock()
                best = min(best, (theirs - (before + after) / 2, (after - before) / 2), key=lambda one: one[1])
            elif rank == other:
                store.wait([ask])
                store.set(answer, repr(clock()))
        if rank == 0:
            found[other] = best
    return found


def _seconds(session: Session, function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    session.wait()
    return time.perf_counter() - begin

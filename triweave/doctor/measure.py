"""Measures what ranks do alone and between each other: small, the best of a few, so that a busy host is no slow one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from triweave.groups import Group
from triweave.probe.session import Session

REPEATS = 5
LEAST_SHARE = 0.01
"""Of a time that is left at least when waiting is taken off."""
PASSES = {True: 1, False: 3}
"""Over all pairs, with NCCL and with gloo: what else a busy host does in one of them, it does not do in all."""
ENOUGH_S = 0.5
"""For one size over one link."""
MOST_ROUNDS = 15
"""In which hosts meet each other; a larger job's hosts meet so many others each."""
ALONE_REPEATS = 60
CALM_ROUNDS, CALM_S = 8, 0.06
"""How often they are done on a CPU, and the time between: at one go ranks of a shared machine were 17 % apart."""
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
    unhindered_bytes_per_s: float = 0.0
    """What it may be where no process of its ranks waits for a processor that others have; 0 is not looked at."""

    @property
    def at_most_bytes_per_s(self) -> float:
        """What it may be on an idle host."""
        return max(self.bytes_per_s, self.unhindered_bytes_per_s)


def bytes_sent(on_gpu: bool) -> int:
    """Large enough for the bandwidth to show, and on a link of 10 Mbit/s still over in seconds."""
    return 64 * 2**20 if on_gpu else 2 * 2**20


def measure_group(session: Session, kind: str, group: Group) -> Between:
    """An all-reduce over `group`; its ranks call it together. Type: partial -> replicated, of zeros."""
    size = bytes_sent(session.on_gpu)
    whole = torch.zeros(size // 4, device=session.device)

    def reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=group.handle)

    reduce(whole)  # makes the connections
    latency_s = min(_seconds(session, lambda: reduce(whole[:1])) for _ in range(3 * REPEATS))
    with Waiting() as waiting:
        taken = [waiting.sample(session, lambda: reduce(whole)) for _ in range(REPEATS)]
    waited = torch.tensor([sample.waited_s for sample in taken], dtype=torch.float64, device=session.device)
    dist.all_reduce(waited, group=group.handle)
    best_s, unhindered_s = best_of(taken, waited.tolist())
    bus = size * 2 * (group.size - 1) / group.size
    return Between(kind, group.ranks, bus / best_s, latency_s, size, bus / unhindered_s)


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

    def exchange(part: torch.Tensor) -> None:
        if sends:
            dist.send(part, receiver)
            dist.recv(word, receiver)
        else:
            dist.recv(part, sender)
            # On a slow link a second message is enough: the receiver says so to both.
            word.fill_(float(time.monotonic() - first > ENOUGH_S))
            dist.send(word, sender)

    first = time.monotonic()
    exchange(message[:1])  # makes the connection
    words: list[float] = []
    while len(words) < 3 * REPEATS and not (words and word.item()):
        words.append(_seconds(session, lambda: exchange(message[:1])))
    first = time.monotonic()
    exchange(message)
    wholes: list[Sample] = []
    with Waiting() as waiting:
        while len(wholes) < REPEATS and not (wholes and word.item()):
            wholes.append(waiting.sample(session, lambda: exchange(message)))
    waited = torch.tensor([sample.waited_s for sample in wholes], dtype=torch.float64, device=session.device)
    if not sends:
        dist.send(waited, sender)
        return None
    theirs = torch.empty_like(waited)
    dist.recv(theirs, receiver)
    there_and_back = min(words)
    best_s, unhindered_s = best_of(wholes, (waited + theirs).tolist())
    rate, unhindered = (rate_of(size, there_and_back, seconds) for seconds in (best_s, unhindered_s))
    return Between(kind, (sender, receiver), rate, there_and_back / 2, size, unhindered)


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
    of many: what other processes take of it does not count. What they do on a core's other thread does, so the many are
    spread over a while, in which each rank meets a calm moment.
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
    for _ in range(CALM_ROUNDS):
        for _ in range(ALONE_REPEATS):
            begin = time.thread_time()
            for _ in range(4):
                todo()
            taken.append(time.thread_time() - begin)
        time.sleep(CALM_S)
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


@dataclass(frozen=True, slots=True)
class Sample:
    """Something that was timed once."""

    taken_s: float
    waited_s: float
    """Of this process, for a processor."""


class Waiting:
    """Seconds that this process's threads were ready to run while another process had their processor.

    The kernel's run delay (Documentation/scheduler/sched-stats.rst: the second field of a task's schedstat), of the
    threads that live now. The files stay open: a reading takes microseconds, in which little is missed or added.
    """

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        """Of the process whose threads `tasks` lists; where the kernel does not tell, nobody waits."""
        self._files: list[BinaryIO] = []
        for task in tasks.iterdir() if tasks.is_dir() else ():
            with suppress(OSError):  # a thread may have ended meanwhile
                self._files.append((task / "schedstat").open("rb", buffering=0))

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()

    def seconds(self) -> float:
        """So far, of all threads together; of one that has ended no more."""
        nanoseconds = 0
        for file in self._files:
            with suppress(OSError, IndexError):
                nanoseconds += int(os.pread(file.fileno(), 64, 0).split()[1])
        return nanoseconds / 1e9

    def sample(self, session: Session, function: Callable[[], object]) -> Sample:
        """Time `function`."""
        before = self.seconds()
        taken = _seconds(session, function)
        return Sample(taken, max(0.0, self.seconds() - before))


def best_of(samples: Sequence[Sample], waited_s: Sequence[float]) -> tuple[float, float]:
    """The shortest time that was taken, and what of it nobody waited for a processor.

    Of the shortest alone: in the others threads wait at the same time, and more is counted than they took longer.

    Args:
        samples: times.
        waited_s: seconds of each in which threads of all processes that take part have waited, added up.
    """
    taken_s, waited = min((sample.taken_s, its) for sample, its in zip(samples, waited_s, strict=True))
    return taken_s, max(taken_s - waited, LEAST_SHARE * taken_s)

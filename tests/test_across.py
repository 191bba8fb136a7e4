"""Sums over shard groups on GPUs in pretence: right in any order of the streams, and every wait of theirs is needed.

Inside a group copies and sums are those that run on GPUs (`test_shared_memory`); NCCL is pretended too: its stream
waits for the stream that starts it, and no rank leaves before all have come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pretend_gpus import Gpu, Step, Stream, run, without_wait
from test_shared_memory import SHARDS, STEPS, drawn, in_rank_order, node
from torch import Tensor

from triweave.groups import Group
from triweave.transport import across as module
from triweave.transport.across import Across
from triweave.transport.shared_memory import SharedMemory

INSIDE, GROUPS = 2, 2
NUMELS = tuple(INSIDE * shard for shard in SHARDS)
SIDE, NCCL = 3, 4
"""Streams of a GPU beside those of computing (0), copies (1) and sums (2)."""


@dataclass
class Meeting:
    """One all-reduce of NCCL's."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None

    def leave(self, rank: int) -> None:
        """Give a rank the sum, once all are there."""
        if self.total is None:
            self.total = sum(part for _, part in sorted(self.parts.items()))
        self.parts[rank].copy_(self.total)


@dataclass
class Work:
    """What NCCL gives back."""

    gpu: Gpu
    done: Any

    def wait(self) -> None:
        """The current stream waits."""
        self.gpu.current.wait_event(self.done)


class Nccl:
    """The communicators between the groups."""

    def __init__(self) -> None:
        self.meetings: dict[tuple[int, ...], list[Meeting]] = {}

    def starter(self, gpu: Gpu) -> Callable[[Tensor, Group], tuple[Tensor, Work]]:
        """`start_all_reduce` of one GPU."""
        count = 0

        def start(part: Tensor, group: Group) -> tuple[Tensor, Work]:
            nonlocal count
            own, stream = self.meetings.setdefault(group.ranks, []), gpu.streams[NCCL]
            own += [] if count < len(own) else [Meeting()]
            meeting, count = own[count], count + 1
            stream.wait_stream(gpu.current)
            stream.queue.append(Step(lambda: meeting.parts.update({group.rank: part}), name="NCCL comes"))
            everyone = lambda: len(meeting.parts) == group.size  # noqa: E731
            stream.queue.append(Step(lambda: meeting.leave(group.rank), everyone, "NCCL leaves"))
            return part, Work(gpu, stream.record_event())

        return start


def reduce_steps(gpu: Gpu, memory: SharedMemory, group: int, given: list[list[Tensor]]) -> None:
    """Steps of one rank: sums made, reduced inside the group and across, used, and written over."""
    rank = memory.group.rank
    way = Across(Group((rank, rank + INSIDE), group), gpu.streams[SIDE])  # type: ignore[arg-type]
    buffers = [memory.buffer(numel, torch.float32) for numel in NUMELS]
    values = [[drawn(INSIDE, group, unit, step)[rank] for unit in range(len(NUMELS))] for step in range(STEPS)]

    def program() -> None:
        for step in range(STEPS):
            works = []
            for buffer, mine in zip(buffers, values[step], strict=True):
                buffer.reclaim()
                buffer.whole.copy_(mine)
                works.append(way.all_reduce(buffer.whole.chunk(INSIDE)[rank], after=buffer.reduce_scatter()))
            for work in works:
                work.wait()  # type: ignore[union-attr]
            owned = [buffer.whole.chunk(INSIDE)[rank] for buffer in buffers]
            given.append([one.clone() for one in owned])
            for one in owned:
                one.mul_(torch.inf)

    gpu.program(program)


def check(seed: int) -> None:
    """All ranks' steps, queued and then run in one of the possible orders."""
    nccl = Nccl()
    gpus, answers = [], []
    for group in range(GROUPS):
        for gpu, memory in node(INSIDE):
            gpu.streams += [Stream(gpu, SIDE), Stream(gpu, NCCL)]
            given: list[list[Tensor]] = []
            with patch.object(module, "start_all_reduce", nccl.starter(gpu)):
                reduce_steps(gpu, memory, group, given)
            gpus.append(gpu)
            answers.append((memory.group.rank, given))
    run(gpus, seed)
    for rank, given in answers:
        for step in range(STEPS):
            for unit in range(len(NUMELS)):
                sums = [in_rank_order(drawn(INSIDE, group, unit, step)).chunk(INSIDE)[rank] for group in range(GROUPS)]
                assert torch.equal(given[step][unit], sums[0] + sums[1])


def test_any_order_gives_the_same() -> None:
    """However far ranks and streams run apart, parts are summed inside a group, then across, and nothing hangs."""
    for seed in range(20):
        check(seed)


@pytest.mark.parametrize(("waits", "waited_for"), [(SIDE, 2), (NCCL, SIDE), (0, NCCL)])
def test_missing_wait_between_streams_is_seen(waits: int, waited_for: int) -> None:
    """Without the side stream's wait for the sums, NCCL's for that stream, or that of what computes, it goes wrong."""
    with without_wait(waits, waited_for):
        for seed in range(60):
            try:
                check(seed)
            except AssertionError:
                return
    pytest.fail("no order shows it")


def test_alone_there_is_nothing_to_sum() -> None:
    """With one shard group what was started inside it is all that there is to wait for."""
    after = Work(Gpu({}), None)
    assert Across(Group((0,), 0)).all_reduce(torch.ones(1), after) is after
    assert Across(Group((0,), 0)).all_reduce(torch.ones(1)) is None

"""What products lose while something moves data beside them: copy engines, additions of sums, NCCL's kernels.

Alone and beside take turns, so that both are timed at the speed that the card keeps: timed one after the other, the
first is at the speed of a cool card, and the difference is the power limit's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from triweave.collectives import start_reduce_scatter
from triweave.groups import Group
from triweave.planner.profile import Slowdown
from triweave.probe.copies import pull
from triweave.probe.session import Mark, Session
from triweave.sharing import part_numel
from triweave.transport.choose import choose_memory, choose_transport
from triweave.transport.copy_engine import CopyEngines
from triweave.transport.shared_memory import SharedMemory

MIB = 2**20
TURNS = 12
PRODUCTS = 12
SLICE_BYTES = 32 * MIB
BUFFERS, BUFFER_BYTES = 6, 256 * MIB
REDUCED_BYTES = 128 * MIB
"""Such a collective takes about half as long as a product of eight billion parameters' layer."""

Side = Callable[[], tuple[Mark, Mark]]
"""Starts to move data and says when it begins and ends."""


def measure_slowdowns(session: Session) -> tuple[Slowdown, ...]:
    """Everything that moves data in training, among all ranks of the largest group."""
    if not session.groups:
        return ()
    group = session.groups[max(session.groups)]
    found = []
    if session.on_gpu:
        transport = choose_transport("auto", group, True, session.device, SLICE_BYTES)
        if isinstance(transport, CopyEngines):
            found.append(Slowdown("copies", _lost(session, group, _copying(session, transport))))
        buffers = _buffers(session, group)
        if buffers is not None:
            found.append(Slowdown("buffers", _lost(session, group, buffers)))
        found.append(Slowdown("collectives", _lost(session, group, _reducing(session, group))))
    return tuple(found)


def _lost(session: Session, group: Group, side: Side) -> float:
    """Seconds that products take longer, for each second of what is beside them."""
    tokens, features, out = 8192, 4096, 14336
    x, weight = session.random(tokens, features), session.random(out, features)
    y = session.random(tokens, out)
    alone: list[float] = []
    beside: list[float] = []
    moving: list[float] = []
    for turn in range(TURNS):
        for with_side in (False, True) if turn % 2 else (True, False):
            session.meet(group)
            # So many that both ranks are at work when the data begins to move.
            for _ in range(2):
                torch.mm(x, weight.t(), out=y)
            moved = side() if with_side else None
            before = session.mark()
            for _ in range(PRODUCTS):
                torch.mm(x, weight.t(), out=y)
            after = session.mark()
            session.wait()
            (beside if with_side else alone).append(before.until(after))
            if moved is not None:
                moving.append(moved[0].until(moved[1]))
    # The first turns bring the card to the speed that it keeps.
    medians = [statistics.median(times[TURNS // 3 :]) for times in (alone, beside, moving)]
    alone_s, beside_s, moving_s = session.worst(medians, group)
    return round(max(0.0, (beside_s - alone_s) / moving_s), 4)


def _copying(session: Session, transport: CopyEngines) -> Side:
    here = torch.empty(SLICE_BYTES, dtype=torch.uint8, device=session.device)

    def start() -> tuple[Mark, Mark]:
        transport.stream.wait_stream(torch.cuda.current_stream())
        begin = session.mark(transport.stream)
        for _ in range(4 * PRODUCTS):
            pull(transport, here)
        return begin, session.mark(transport.stream)

    return start


def _buffers(session: Session, group: Group) -> Side | None:
    """Gradient sums as `optimizer` reduces them; None where training would take collectives."""
    numel = BUFFER_BYTES // 4
    part = part_numel("optimizer", [numel], group.size)
    memory = choose_memory("auto", group, session.device, [BUFFER_BYTES] * BUFFERS, part)
    if not isinstance(memory, SharedMemory):
        return None
    buffers = [memory.buffer(numel, torch.float32) for _ in range(BUFFERS)]

    def start() -> tuple[Mark, Mark]:
        for buffer in buffers:
            buffer.reclaim()
        memory.copies.wait_stream(torch.cuda.current_stream())
        begin = session.mark(memory.copies)
        for buffer in buffers:
            buffer.reduce_scatter()
        return begin, session.mark(memory.sums)

    return start


def _reducing(session: Session, group: Group) -> Side:
    part = session.random(REDUCED_BYTES // 4, dtype=torch.float32)
    stream = torch.cuda.Stream(session.device)

    def start() -> tuple[Mark, Mark]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            begin = session.mark(stream)
            for _ in range(PRODUCTS):
                _, work = start_reduce_scatter(part, group)
                if work is not None:
                    work.wait()
            return begin, session.mark(stream)

    return start

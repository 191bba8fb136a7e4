"""What copy engines carry, by the transports that training takes: slices of one peer, and flat buffers of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from triweave.groups import Group
from triweave.planner.profile import Copied, CopyCurve
from triweave.probe.session import Session
from triweave.sharing import part_numel
from triweave.transport.buffers import Buffer
from triweave.transport.choose import choose_memory, choose_transport
from triweave.transport.copy_engine import CopyEngines
from triweave.transport.shared_memory import SharedMemory

MIB = 2**20
SLICES = tuple(mib * MIB for mib in (1, 4, 8, 16, 32, 64, 128))
BUFFERS = tuple(mib * MIB for mib in (1, 16, 64, 256, 1024))
"""Bytes of gradient sums of one unit: those of a layer of Llama-3-8B are 830 MiB."""
_TOGETHER = 10


def measure_copies(session: Session) -> tuple[CopyCurve, ...]:
    """Curves over the first 2, 4, ... ranks; none where training would take collectives."""
    curves: list[CopyCurve] = []
    for group in session.in_order():
        if not session.on_gpu:
            break
        transport = choose_transport("auto", group, True, session.device, SLICES[-1])
        if isinstance(transport, CopyEngines):
            points = tuple((size, round(pull_seconds(session, group, transport, size), 9)) for size in SLICES)
            curves.append(CopyCurve("slice", group.size, points))
        curves += _buffers(session, group)
        session.tell("copy engines", 0.5)
    return tuple(curves)


def pull_seconds(session: Session, group: Group, transport: CopyEngines, size: int) -> float:
    """One slice from the next rank, of ten in a row."""
    session.meet(group)
    here = torch.empty(size, dtype=torch.uint8, device=session.device)
    for _ in range(2):
        pull(transport, here)
    session.meet(group)
    before = session.mark(transport.stream)
    for _ in range(_TOGETHER):
        pull(transport, here)
    after = session.mark(transport.stream)
    session.meet(group)
    return session.worst([before.until(after) / _TOGETHER], group)[0]


def pull(transport: CopyEngines, here: torch.Tensor) -> None:
    """Take a slice from the next rank, without asking whether it is there."""
    there = transport.staged[transport.peers[0]]
    transport.flags.copy(here.data_ptr(), there, here.nbytes, transport.stream.cuda_stream)


def _buffers(session: Session, group: Group) -> list[CopyCurve]:
    numels = [size // 4 for size in BUFFERS]
    memory = choose_memory("auto", group, session.device, list(BUFFERS), part_numel("optimizer", numels, group.size))
    if not isinstance(memory, SharedMemory):
        return []
    buffers = [memory.buffer(numel, torch.float32) for numel in numels]
    calls: dict[Copied, Callable[[Buffer], object]] = {
        "gather": lambda buffer: buffer.gather(),
        "reduce_scatter": lambda buffer: buffer.reduce_scatter(),
        "all_reduce": lambda buffer: buffer.all_reduce(),
    }
    curves = []
    for what, call in calls.items():

        def once(buffer: Buffer, call: Callable[[Buffer], object] = call) -> None:
            work = call(buffer)
            work.wait()  # type: ignore[attr-defined]
            buffer.reclaim()

        points = tuple(
            (size, round(session.seconds(lambda buffer=buffer: once(buffer), group, repeats=8), 9))  # type: ignore[misc]
            for size, buffer in zip(BUFFERS, buffers, strict=True)
        )
        curves.append(CopyCurve(what, group.size, points))
    session.meet(group)
    return curves

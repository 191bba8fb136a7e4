"""What one gather and one scatter cost the host: calls to the driver, and Python's own time, without a GPU.

    python bench/host_calls.py

Streams, events and the driver only count; sums are of a few bytes. What is timed is the package's own code and torch's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from triweave.groups import Group
from triweave.transport.copy_engine import CopyEngines, room_number
from triweave.transport.stream_flags import Driver, StreamFlags, flag_bytes

REPEATS, ROOM = 2000, 256


@dataclass
class Counted:
    """The driver, the streams and the events of one rank; all they do is count."""

    calls: Counter[str] = field(default_factory=Counter)
    cuda_stream: int = 0

    def batch(self, *_: Any) -> int:
        self.calls["flags"] += 1
        return 0

    def copy(self, *_: Any) -> int:
        self.calls["copies"] += 1
        return 0

    def record(self, *_: Any) -> None:
        self.calls["events"] += 1

    def wait_event(self, *_: Any) -> None:
        self.calls["events"] += 1


def engines(tp: int, counted: Counted, room: int = ROOM) -> CopyEngines:
    """Transport of rank 0; `room` is the bytes of a slice."""
    rooms = torch.zeros(tp, tp, room, dtype=torch.uint8)
    ranks = range(tp)
    return CopyEngines(
        Group(tuple(ranks), 0),
        counted,  # type: ignore[arg-type]
        StreamFlags(Driver(counted.batch, counted.copy), tuple(rank * flag_bytes(tp) for rank in ranks), 0),
        staged=tuple(rooms[holder, 0].data_ptr() for holder in ranks),
        places=tuple(rooms[holder, room_number(holder, 0)].data_ptr() for holder in ranks),
        received=tuple(rooms[0, room_number(0, sender)] for sender in ranks),
        owners=(rooms,),
        piece_s=0.0,
    )


def microseconds(call: Callable[[], None]) -> float:
    """Fastest of many: the machine may be busy with other things."""
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return 1e6 * best


def main() -> None:
    print("ranks | call | flags | copies | events | all | us of Python and torch")
    for tp in (2, 4, 8):
        counted = Counted()
        transport = engines(tp, counted)
        x = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
        parts = {size: torch.zeros(size, 1, 64, dtype=torch.bfloat16) for size in range(1, tp + 1)}

        def gather(transport: CopyEngines = transport, x: torch.Tensor = x) -> None:
            gathering = transport.gather(x, whole=False, other=64)
            for piece in gathering.pieces:
                gathering.rows(piece)
            gathering.finish()

        def scatter(transport: CopyEngines = transport, parts: dict[int, torch.Tensor] = parts, tp: int = tp) -> None:
            scattering = transport.scatter((tp, 1), 64, 64)
            for piece in scattering.pieces:
                scattering.send(piece, parts[len(piece)])
            scattering.finish()

        with patch("torch.cuda.current_stream", lambda c=counted: c), patch("torch.cuda.Event", lambda c=counted: c):
            for call in (gather, scatter):
                call()
                counted.calls.clear()
                call()
                each = [counted.calls[name] for name in ("flags", "copies", "events")]
                print(" | ".join(map(str, (tp, call.__name__, *each, sum(each), f"{microseconds(call):.1f}"))))


if __name__ == "__main__":
    main()

"""The copy engines of GPUs that are not there: the trainer's own transport without streams, flags and driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triweave.dryrun.card import META
from triweave.groups import Group
from triweave.transport.choose import ChooseTransport, Wanted
from triweave.transport.copy_engine import CopyEngines
from triweave.transport.interface import Transport
from triweave.transport.plain import Collectives
from triweave.transport.stream_flags import Driver, StreamFlags


class NoStream:
    """Everything is done as soon as it is said."""

    cuda_stream = 0

    def wait_event(self, event: NoEvent) -> None:
        """Go on."""


class NoEvent:
    """Nothing is left to wait for."""

    def record(self, stream: NoStream) -> None:
        """It is done."""


class NoStreams:
    """What of `torch.cuda` the copy engines ask."""

    def current_stream(self) -> NoStream:
        """The only one."""
        return NoStream()

    def Event(self) -> NoEvent:
        """One that is done."""
        return NoEvent()


def transport_on_paper(gpus_per_node: int, set_apart: Callable[[torch.Tensor], None]) -> ChooseTransport:
    """Choose as `choose_transport` does where GPUs of a node reach each other, and make what it would.

    Args:
        gpus_per_node: ranks of a node.
        set_apart: told of the memory that peers see, which is not the caching allocator's.
    """

    def choose(
        wanted: Wanted, group: Group, sequence_parallel: bool, device: torch.device, slice_bytes: int
    ) -> Transport:
        if not uses_copy_engines(wanted, group.ranks, sequence_parallel, gpus_per_node):
            return Collectives(group, sequence_parallel)
        room = torch.empty(slice_bytes, dtype=torch.uint8, device=META)
        set_apart(room)
        stream: Any = NoStream()
        nowhere = (0,) * group.size
        flags = StreamFlags(Driver(lambda *_: 0, lambda *_: 0), nowhere, group.rank)
        # All rooms are one: on the meta device nothing is written to any of them.
        rooms = (room,) * group.size
        return CopyEngines(group, stream, flags, staged=nowhere, places=nowhere, received=rooms, cuda=NoStreams())

    return choose


def uses_copy_engines(wanted: Wanted, ranks: tuple[int, ...], sequence_parallel: bool, gpus_per_node: int) -> bool:
    """Whether the ranks of a tensor-parallel group share a node, whose GPUs reach each other, and have use for it."""
    one_node = len({rank // gpus_per_node for rank in ranks}) == 1
    return wanted == "auto" and len(ranks) > 1 and sequence_parallel and one_node

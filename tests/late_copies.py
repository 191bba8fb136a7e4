"""Copies between a device and its host at the latest moment allowed: when they are waited for.

On a GPU a copy may run at any time between its start and the wait. Here what it will write is not a number until then,
so whoever reads too early, frees too early or never waits computes with that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from triweave import offload

NOT_A_NUMBER = 255
"""Bytes of a NaN, in every floating-point type."""


class LateEvent:
    """Runs the copies before it when waited for."""

    def __init__(self, copies: LateCopies, number: int) -> None:
        self.copies, self.number = copies, number

    def wait(self) -> None:
        """Do what is left of them."""
        self.copies.run(self.number)


class LateCopies:
    """Stands in for `offload.Copies`."""

    def __init__(self, device: torch.device) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.done = 0

    def start(self, to: Tensor, source: Tensor, after: LateEvent | None = None) -> None:
        """Queue a copy."""
        back = to.untyped_storage().resizable()
        if back:
            to.fill_(NOT_A_NUMBER)

        def work() -> None:
            if after is not None:
                after.wait()
            for one in (to, source):
                assert one.untyped_storage().nbytes() == one.numel(), "freed while a copy was under way"
            to.copy_(source)

        self.queue.append(work)

    def mark(self) -> LateEvent:
        """All that was queued."""
        return LateEvent(self, self.done + len(self.queue))

    def run(self, number: int) -> None:
        """The first `number` copies."""
        while self.done < number:
            self.done += 1
            self.queue.popleft()()


@contextmanager
def late_copies() -> Iterator[None]:
    """Offloaders that are made inside copy late."""
    with patch.object(offload, "Copies", LateCopies):
        yield

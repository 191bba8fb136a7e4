"""Collectives of the data-parallel axis that do their work at the latest moment allowed: when they are waited for.

On a GPU a collective may run at any time between its start and the wait. Here what it will write is not a number until
then, so whoever reads too early, or never waits, computes with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from triweave.collectives import Pending, all_reduce, gather_into, reduce_scatter_into
from triweave.groups import Group
from triweave.transport import across, buffers


@dataclass
class LateWork:
    """Runs `work` when waited for."""

    work: Callable[[], object]

    def wait(self) -> None:
        """Do it."""
        self.work()


def _hide(x: Tensor) -> Tensor:
    kept = x.clone()
    x.fill_(torch.nan)
    return kept


def _late_reduce_scatter(out: Tensor, x: Tensor, group: Group, *, async_op: bool) -> LateWork:
    kept = _hide(x)

    def work() -> None:
        x.copy_(kept)
        reduce_scatter_into(out, x, group)

    return LateWork(work)


def _late_all_reduce(x: Tensor, group: Group) -> Pending:
    if group.size == 1:
        return x, None
    kept = _hide(x)
    return x, LateWork(lambda: all_reduce(x.copy_(kept), group))  # type: ignore[return-value]


def _late_gather(out: Tensor, x: Tensor, group: Group, *, async_op: bool) -> LateWork:
    mine = x.clone()
    out.fill_(torch.nan)
    # A rank's own slice is its master where weights are float32: a gather in place leaves it alone.
    x.copy_(mine)
    return LateWork(lambda: gather_into(out, mine, group))


@contextmanager
def late_collectives() -> Iterator[None]:
    """Units of this process gather and reduce late."""
    with (
        patch.object(buffers, "gather_into", _late_gather),
        patch.object(buffers, "reduce_scatter_into", _late_reduce_scatter),
        patch.object(buffers, "start_all_reduce", _late_all_reduce),
        patch.object(across, "start_all_reduce", _late_all_reduce),
    ):
        yield

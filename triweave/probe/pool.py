"""Matrices of any shape cut out of a few large tensors, so that many shapes take no more memory than one."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from triweave.probe.session import Session

_ALIGNMENT = 512


class Pool:
    """Random numbers of one type, cut from another place each time: what was read last is not in the cache."""

    def __init__(self, session: Session, numel: int, dtype: torch.dtype | None = None) -> None:
        self.whole = session.random(numel, dtype=dtype)
        self._at = 0

    def take(self, *shape: int) -> Tensor:
        """A contiguous tensor of random numbers; it overlaps with others that were taken."""
        numel = prod(shape)
        if self._at + numel > self.whole.numel():
            self._at = 0
        taken = self.whole[self._at : self._at + numel].view(shape)
        self._at += -(-numel // _ALIGNMENT) * _ALIGNMENT
        return taken


def largest(*sizes: int) -> int:
    """Room for the largest, and some to move in."""
    return max(sizes) + 64 * _ALIGNMENT

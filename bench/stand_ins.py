"""Transports that a bench needs: one that moves nothing, and one that holds its rank up at random moments."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from triweave.groups import Group
from triweave.transport.plain import WholeGathering


@dataclass
class Alone:
    """Nothing is communicated: what would arrive lies there already, what would leave is dropped."""

    group: Group
    there: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    name: str = "alone"

    def gather(self, x: Tensor, *, whole: bool, other: int) -> WholeGathering:
        shape = (x.shape[0] * self.group.size, *x.shape[1:])
        if shape not in self.there:
            self.there[shape] = x.repeat(self.group.size, *(1 for _ in x.shape[1:]))
        return WholeGathering((range(self.group.size),), (self.there[shape], None))

    def scatter(self, tokens: tuple[int, int], moved: int, other: int) -> Dropped:
        return Dropped((range(self.group.size),), self.group)


@dataclass
class Dropped:
    pieces: tuple[range, ...]
    group: Group
    part: Tensor | None = None

    def send(self, piece: range, part: Tensor) -> None:
        self.part = part

    def finish(self) -> Tensor:
        assert self.part is not None
        return self.part.chunk(self.group.size)[self.group.rank]


@dataclass
class HeldUp:
    """Another transport whose rank is slow at random moments: its host, its products or its copies."""

    inner: Any
    chance: random.Random
    streams: tuple[torch.cuda.Stream, ...] = ()
    pieces: tuple[range, ...] = ()
    name: str = "held up"

    def _wait(self) -> None:
        if self.chance.random() < 0.5:
            return
        how_long_s = self.chance.choice((0.05, 0.3, 1.0, 5.0)) * 1e-3
        number = self.chance.randrange(len(self.streams) + 1)
        if number == len(self.streams):
            time.sleep(how_long_s)
            return
        with torch.cuda.stream(self.streams[number]):
            torch.cuda._sleep(int(how_long_s * 1.8e9))  # cycles

    def gather(self, x: Tensor, *, whole: bool, other: int) -> Any:
        self._wait()
        return self._around(self.inner.gather(x, whole=whole, other=other))

    def scatter(self, tokens: tuple[int, int], moved: int, other: int) -> Any:
        self._wait()
        return self._around(self.inner.scatter(tokens, moved, other))

    def _around(self, moving: Any) -> HeldUp:
        return replace(self, inner=moving, pieces=moving.pieces)

    @property
    def tokens(self) -> tuple[int, int]:
        return self.inner.tokens

    def rows(self, piece: range) -> Tensor:
        self._wait()
        return self.inner.rows(piece)

    def send(self, piece: range, part: Tensor) -> None:
        self._wait()
        self.inner.send(piece, part)

    def finish(self) -> Tensor:
        self._wait()
        return self.inner.finish()

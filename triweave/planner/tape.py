"""What a block of the model makes and frees, in order: the form in which memory is kept account of.

A bookkeeping writes down, tensor by tensor, what one layer does in forward and in backward. Everything else is
derived from that list: what stays in between (the activations), the most that is held at once and which tensors
those are, and the requests that an allocator sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Step = tuple[str, int]
"""A tensor's name and its bytes: positive where it is made, negative where it is freed."""


class Tape:
    """Records steps and follows what is held."""

    def __init__(self, held: Mapping[str, int] | None = None) -> None:
        """`held` are the tensors that are there at the start."""
        self.steps: list[Step] = []
        self.held: dict[str, int] = dict(held or {})
        self.now = self.peak = sum(self.held.values())
        self.at_peak: dict[str, int] = dict(self.held)

    def make(self, name: str, size: int) -> None:
        """Allocate `size` bytes. An empty tensor is no tensor; one that is there already is not made again."""
        if size <= 0 or name in self.held:
            return
        self.steps.append((name, size))
        self.held[name] = size
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            self.at_peak = dict(self.held)

    def free(self, *names: str) -> None:
        """Free tensors; those that are not there are passed over."""
        for name in names:
            size = self.held.pop(name, 0)
            if size:
                self.steps.append((name, -size))
                self.now -= size

    def rename(self, old: str, new: str) -> None:
        """Give a tensor another name: it is handed on, and stays where it is."""
        size = self.held.pop(old, 0)
        if size:
            self.held[new] = size
            self.steps.append((f"{old}>{new}", 0))


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward of a block: its steps, and the most that it holds, with what was there before."""

    steps: tuple[Step, ...]
    peak: int
    at_peak: Mapping[str, int]

    @classmethod
    def of(cls, tape: Tape) -> Pass:
        """What a tape has recorded."""
        return cls(tuple(tape.steps), tape.peak, dict(tape.at_peak))


@dataclass(frozen=True, slots=True)
class Block:
    """One layer, the embedding or the head: what it keeps for backward, and what its two passes hold at most.

    `forward.peak` counts from nothing, the input included; `backward.peak` counts what was kept.
    """

    kept: Mapping[str, int]
    """Where it waits in host memory it is among `offloaded`, and only the passes count it."""
    forward: Pass
    backward: Pass
    put_off: Mapping[str, int] = field(default_factory=dict)
    """What stays from the input half of a split backward to its weight half."""
    offloaded: Mapping[str, int] = field(default_factory=dict)
    """What waits in host memory from forward to backward."""

    @property
    def kept_bytes(self) -> int:
        """Bytes from the forward of a micro-batch to its backward."""
        return sum(self.kept.values())

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the device that host memory saves while a micro-batch waits for its backward."""
        return sum(self.offloaded.values())

    @property
    def put_off_bytes(self) -> int:
        """Bytes from the input half of the backward to the weight half."""
        return sum(self.put_off.values())


def total(parts: Iterable[tuple[Mapping[str, int], int]]) -> Counter[str]:
    """The sum of several maps of bytes, each taken a number of times."""
    result: Counter[str] = Counter()
    for sizes, times in parts:
        if times:
            for name, size in sizes.items():
                result[name] += size * times
    return result

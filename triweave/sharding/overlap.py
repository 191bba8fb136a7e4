"""Which collectives run beside what computes, and how many of them.

A collective is started on the group's own stream, which first waits for what the computing stream was given before;
`wait` makes the computing stream wait in turn and stops no host thread (on gloo it does). All tensors are made and
freed by the computing stream, and only after such a wait, so the caching allocator needs no word about other
streams. Every data-parallel rank starts the same collectives in the same order: the schedule gives it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from triweave.layout import REDUCTIONS_BESIDE, UNITS_AHEAD
from triweave.sharding.unit import Reduction, Unit
from triweave.transport.buffers import Work


class Weights:
    """Whole weights, present when they are used: gathered ahead and freed after (`full`), or waited for (else)."""

    def __init__(self) -> None:
        self._uses: Sequence[Unit] = ()
        self._next = 0

    def begin(self, uses: Sequence[Unit]) -> None:
        """Learn in which order a run's forwards and backwards use the units, and gather the first ones."""
        self._uses, self._next = uses, 0
        self._look_ahead()

    def use(self, unit: Unit) -> None:
        """Have the weights of `unit` for what computes next, and start to gather those that come after it."""
        if unit in self._uses[self._next : self._next + 1]:
            self._next += 1
        unit.gather()
        self._look_ahead()

    def leave(self, unit: Unit) -> None:
        """Free the weights of `unit`, unless they are needed again at once (the head, between its two passes)."""
        if unit not in self._coming():
            unit.release()

    def _look_ahead(self) -> None:
        for unit in self._coming():
            unit.prefetch()

    def _coming(self) -> Sequence[Unit]:
        return self._uses[self._next : self._next + UNITS_AHEAD]


class Gradients:
    """Gradient sums, reduced as soon as they are whole, beside the backward of the units that follow.

    Where only shards are kept, that is after each backward of a unit, and a bounded number is in flight, for each
    holds a whole buffer. Where whole sums are kept, it is after the unit's last backward of the step, and all may be
    in flight, for the buffers are there anyway.

    Shard groups sum what they have among each other once a step: shards as soon as a unit's last reduction has been
    added to them, whole sums as the second half of their one reduction.
    """

    def __init__(self) -> None:
        self._backwards_left: Counter[Unit] = Counter()
        self._open: list[Unit] = []
        self._started: set[Unit] = set()
        self._in_flight: deque[Reduction] = deque()
        self._across: list[Work] = []

    def begin(self, backwards: Counter[Unit]) -> None:
        """Learn how many backwards each unit will have until its whole sums are complete."""
        self._backwards_left = backwards
        self._started.clear()

    def open(self, unit: Unit) -> None:
        """The weight gradients of one backward of `unit` come next."""
        unit.begin_gradients()
        self._open.append(unit)

    def close(self, unit: Unit) -> None:
        """They are all in."""
        self._open.remove(unit)
        if unit.shards_gradients:
            self._finish_down_to(REDUCTIONS_BESIDE - 1)
        self._backwards_left[unit] -= 1
        if unit.shards_gradients or not self._backwards_left[unit]:
            self._start(unit)

    def close_all(self) -> None:
        """A stage's backward is over: the embedding has no input whose gradient ends its own."""
        for unit in tuple(self._open):
            self.close(unit)

    def finish(self, units: Iterable[Unit]) -> None:
        """Have the reduced gradients of `units`: start what was not, wait for all."""
        for unit in units:
            if not unit.shards_gradients and unit not in self._started:
                self._start(unit)
        self._finish_down_to(0)
        for work in self._across:
            work.wait()
        self._across.clear()

    def let_go(self) -> None:
        """Free the buffers of what earlier backwards left in flight: a forward has passed since."""
        if all(reduction.unit.shards_gradients for reduction in self._in_flight):
            self._finish_down_to(0)

    def _finish_down_to(self, count: int) -> None:
        while len(self._in_flight) > count:
            reduction = self._in_flight.popleft()
            reduction.finish()
            if reduction.unit.shards_gradients and self._was_last(reduction.unit):
                work = reduction.unit.start_sum_across()
                self._across += [] if work is None else [work]

    def _was_last(self, unit: Unit) -> bool:
        """Whether the shards of `unit` have all of the step's gradients."""
        return not self._backwards_left[unit] and all(reduction.unit is not unit for reduction in self._in_flight)

    def _start(self, unit: Unit) -> None:
        self._started.add(unit)
        self._in_flight.append(unit.start_reduction())

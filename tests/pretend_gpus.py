"""GPUs in pretence: streams that run late and in any order, so that races and hangs show without a GPU.

Each rank's program runs once, on the host, and only queues its work: tensor operations, events, flags. `run` then
does the queued work of all ranks, one step of one stream at a time, in an order drawn at random. What no order of
the streams forbids will happen in some order, which a real GPU would show once in a thousand runs.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triweave.transport.stream_flags import WAIT, MemoryOperation

WAIT_FOR_EVENT = "wait for event"


@dataclass(eq=False)
class Step:
    """One thing that a stream does when it may."""

    act: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    name: str = ""
    event: Event | None = None
    """What it records, or waits for."""
    number: int = 0
    """Which of the event's records that is."""


@dataclass(eq=False)
class Event:
    """Done when its stream has come to where it was recorded last; whoever waits means the record before that wait."""

    records: list[bool] = field(default_factory=list)

    def record(self, stream: Stream) -> None:
        """As torch's."""
        number = len(self.records)
        self.records.append(False)

        def done() -> None:
            self.records[number] = True

        stream.queue.append(Step(done, name="event", event=self, number=number))


@dataclass(eq=False)
class Stream:
    """Work in order."""

    gpu: Gpu
    cuda_stream: int
    queue: list[Step] = field(default_factory=list)

    def record_event(self) -> Event:
        """As torch's."""
        event = Event()
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        """As torch's."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """As torch's."""
        number = len(event.records) - 1
        self.queue.append(Step(lambda: None, lambda: event.records[number], WAIT_FOR_EVENT, event, number))


class Gpu:
    """One rank's streams, in whose place torch.cuda's stand while its program runs."""

    def __init__(self, memory: dict[int, int]) -> None:
        self.memory = memory  # flags by address, the same for all
        self.streams = [Stream(self, 0), Stream(self, 1)]
        self.current = self.streams[0]
        self.held: list[Tensor] = []  # a GPU's memory is given to others in the order of its streams, a host's at once

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """As torch.cuda.stream."""
        former, self.current = self.current, stream
        yield
        self.current = former

    def batch(self, stream: int, count: int, operations: Sequence[MemoryOperation], flags: int) -> int:
        """As cuStreamBatchMemOp."""
        for operation in operations[:count]:
            self.streams[stream].queue.append(self._step(operation.operation, operation.address, operation.value))
        return 0

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> int:
        """As cuMemcpyAsync."""
        step = Step(lambda: ctypes.memmove(to, source, num_bytes) and None, name="copy")
        self.streams[stream].queue.append(step)
        return 0

    def _step(self, operation: int, address: int, value: int) -> Step:
        """Raising a flag that is up already would lose one of the two."""
        if operation == WAIT:
            return Step(lambda: None, lambda: self.memory[address] == value, f"wait for {value} at {address}")

        def write() -> None:
            assert self.memory[address] != value, "a flag is raised twice"
            self.memory[address] = value

        return Step(write, name=f"write {value} at {address}")

    def program(self, function: Callable[[], Any]) -> Any:
        """Queue what `function` does."""
        with ExitStack() as stack:
            stack.enter_context(patch("torch.cuda.current_stream", lambda: self.current))
            stack.enter_context(patch("torch.cuda.stream", self.stream))
            stack.enter_context(patch("torch.cuda.Event", Event))
            stack.enter_context(_Late(self))
            return function()

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """As a CUDA graph: nothing of what `function` does is done now; gives its result, and what queues all of it.

        As CUDA does, it refuses to wait for what came before, and to end before what it began elsewhere has.
        """
        before = [len(stream.queue) for stream in self.streams]
        result = self.program(function)
        captured = [stream.queue[start:] for stream, start in zip(self.streams, before, strict=True)]
        for stream, start in zip(self.streams, before, strict=True):
            del stream.queue[start:]
        inside = {(step.event, step.number) for steps in captured for step in steps if step.name == "event"}
        waits = [(step.event, step.number) for steps in captured for step in steps if step.name == WAIT_FOR_EVENT]
        assert inside.issuperset(waits), "a graph waits for what was recorded before it began"
        for steps in filter(None, captured[1:]):
            first, last = steps[0], steps[-1]
            begins = first.name == WAIT_FOR_EVENT and (first.event, first.number) in inside
            assert begins, "another stream is no part of a graph before it waits for it"
            assert (last.event, last.number) in waits, "a graph ends before what it began does"

        def replay() -> None:
            records: dict[tuple[Event | None, int], Event] = {key: Event() for key in inside}
            for event in records.values():
                event.records.append(False)
            for stream, steps in zip(self.streams, captured, strict=True):
                for step in steps:
                    stream.queue.append(_again(step, records))

        return result, replay


def _again(step: Step, records: dict[tuple[Event | None, int], Event]) -> Step:
    """The same step, with events of its own."""
    if step.event is None:
        return Step(step.act, step.ready, step.name)
    made = records[step.event, step.number].records
    if step.name == WAIT_FOR_EVENT:
        return Step(lambda: None, lambda: made[0], step.name)

    def done() -> None:
        made[0] = True

    return Step(done, name=step.name)


class _Late(TorchDispatchMode):
    """Queues tensor operations. Views are made at once: they move nothing."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        if func.is_view or name in ("_unsafe_view", "empty.memory_format", "empty_like", "new_empty"):
            made = func(*args, **kwargs)
            self.gpu.held.append(made)
            return made
        queue = self.gpu.current.queue
        if func._schema.is_mutable:
            queue.append(Step(lambda: func(*args, **kwargs), name=name))
            return kwargs.get("out", args[0])
        early = func(*args, **kwargs)  # only its shape and type are of use: the inputs are not there yet
        if not isinstance(early, Tensor):
            return early
        result = torch.full_like(early, torch.nan)
        self.gpu.held.append(result)

        def late() -> None:
            result.copy_(func(*args, **kwargs))

        queue.append(Step(late, name=name))
        return result


def run(gpus: list[Gpu], seed: int) -> None:
    """Do all queued work in one of the orders that the streams allow."""
    chance = random.Random(seed)  # noqa: S311 (no secret)
    streams = [stream for gpu in gpus for stream in gpu.streams]
    # Some streams are much slower than others, another each time.
    weights = [chance.choice((1, 1, 30)) for _ in streams]
    while any(stream.queue for stream in streams):
        able = [(s, w) for s, w in zip(streams, weights, strict=True) if s.queue and s.queue[0].ready()]
        waiting = [stream.queue[0].name for stream in streams if stream.queue]
        assert able, f"all streams hang: {waiting}"
        (stream,) = chance.choices([s for s, _ in able], [w for _, w in able])
        with torch.no_grad():
            stream.queue.pop(0).act()


@contextmanager
def without_wait(waits: int, waited_for: int) -> Iterator[None]:
    """Inside, no stream `waits` waits for an event that was made by a stream `waited_for`."""
    wait, made = Stream.wait_event, Stream.record_event

    def record(self: Stream) -> Any:
        event = made(self)
        event.by = self.cuda_stream  # type: ignore[attr-defined]
        return event

    def careless(self: Stream, event: Any) -> None:
        if (self.cuda_stream, event.by) != (waits, waited_for):
            wait(self, event)

    with patch.object(Stream, "record_event", record), patch.object(Stream, "wait_event", careless):
        yield

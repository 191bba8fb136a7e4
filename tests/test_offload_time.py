"""How long a step takes with offload, on streams whose work takes a given time: what the order of events lets overlap.

The offloader, its copies and autograd are the real ones. Streams only add up seconds: an event knows when its stream
had come so far, and whoever waits for it goes on no earlier. The host takes no time, as far ahead as it gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triweave.offload import Copies, LayerKept, Offloader

LAYERS, BYTES = 8, 4096
FORWARD_S, BACKWARD_S = 1.0, 2.0


@dataclass
class Event:
    """When its stream had come so far."""

    timing: Timing
    at_s: float

    def wait(self) -> None:
        """As torch's: the current stream goes on no earlier."""
        self.timing.current.wait_event(self)


@dataclass
class Stream:
    """Work in order; `at_s` is when the last of it is done."""

    timing: Timing
    at_s: float = 0.0

    def record_event(self) -> Event:
        """As torch's."""
        return Event(self.timing, self.at_s)

    def wait_event(self, event: Event) -> None:
        """As torch's."""
        self.at_s = max(self.at_s, event.at_s)

    def wait_stream(self, other: Stream) -> None:
        """As torch's."""
        self.wait_event(other.record_event())


class Timing(TorchDispatchMode):
    """Streams in the place of torch.cuda's; a copy takes `copy_s` on the stream it is given to."""

    def __init__(self, copy_s: float) -> None:
        super().__init__()
        self.copy_s = copy_s
        self.computing = self.current = Stream(self)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """As torch.cuda.stream."""
        former, self.current = self.current, stream
        yield
        self.current = former

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, torch.cuda's streams are these."""
        with (
            patch("torch.cuda.Stream", lambda _: Stream(self)),
            patch("torch.cuda.current_stream", lambda _: self.current),
            patch("torch.cuda.stream", self.stream),
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self.current is not self.computing:
            self.current.at_s += self.copy_s
        return func(*args, **(kwargs or {}))


class Layer(torch.autograd.Function):
    """Keeps something of its own and takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, timing: Timing) -> Tensor:
        ctx.timing = timing
        ctx.save_for_backward(torch.full((BYTES // 4,), 1.0))
        timing.computing.at_s += FORWARD_S
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        assert kept.sum() == kept.numel()
        ctx.timing.computing.at_s += BACKWARD_S
        return grad * 2, None


def passes(copy_s: float) -> tuple[float, float]:
    """Seconds of the forward and of the backward of all layers; each copy of a layer takes `copy_s`."""
    timing = Timing(copy_s)
    offloader = Offloader(("mlp",))
    with timing.in_place(), timing:
        offloader._out, offloader._back = Copies(torch.device("cuda")), Copies(torch.device("cuda"))

        def layer(x: Tensor) -> Tensor:
            with offloader.of("mlp"):
                y: Tensor = Layer.apply(x, timing)
                return y

        x = torch.ones(4, requires_grad=True)
        offloader.begin_stage()
        y = x
        for _ in range(LAYERS):
            y = offloader.layer(layer, y)
        forward_s = timing.computing.at_s
        y.backward(torch.ones(4))
    assert x.grad is not None
    assert x.grad[0] == 4.0**LAYERS / 2.0**LAYERS
    return forward_s, timing.computing.at_s - forward_s


def test_copies_that_are_as_fast_as_layers_cost_nothing() -> None:
    """Copies out that take as long as a forward are behind it, and so are copies back behind backward.

    A backward that begins at once waits for the last layer's way out alone.
    """
    assert passes(FORWARD_S) == (LAYERS * FORWARD_S, FORWARD_S + LAYERS * BACKWARD_S)
    assert passes(BACKWARD_S)[1] == BACKWARD_S + LAYERS * BACKWARD_S


def test_slow_copies_follow_each_other_without_a_gap() -> None:
    """Copies of three forwards' time, and one and a half backwards', leave and come back one after the other.

    Behind them is all that is computed but the first layer's forward and the last one's backward.
    """
    copy_s = 3.0
    forward_s, backward_s = passes(copy_s)
    # The last layer's way out is not waited for before backward, where nothing comes back of it.
    assert forward_s == FORWARD_S + (LAYERS - 1) * copy_s
    assert backward_s == copy_s + (LAYERS - 1) * copy_s + BACKWARD_S


def test_a_wait_for_the_own_copies_is_seen() -> None:
    """Were each layer's memory given back at its own end, forward would take both times."""

    def at_once(self: Offloader, kept: LayerKept | None) -> None:
        if kept is not None and kept.left is not None:
            kept.left.wait()

    with patch.object(Offloader, "_end_pass", at_once):
        forward_s, _ = passes(FORWARD_S)
    assert forward_s == pytest.approx(2 * LAYERS * FORWARD_S)

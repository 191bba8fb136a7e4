"""Times under the power that a training step draws.

A card that has just been idle multiplies matrices at a speed that its power limit does not let it keep, and one that
does nothing but products is held lower than one that trains. So what is timed runs in turns, in an order drawn anew
each round, in a mixture of products, attention and operations bound by memory in the shares of a training step; a call
of each is timed by itself within that.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from triweave.layers.attention import attend, choose_kernel
from triweave.layers.swiglu import swiglu
from triweave.probe.session import Session

Kind = Literal["product", "attention", "memory"]

SHARES: dict[Kind, float] = {"product": 0.73, "attention": 0.20, "memory": 0.07}
"""Of the GPU's time in a step of Llama-3-8B at sequence 8192 (bench/results, `speed-kernels-2xh200`)."""

SETTLE_S = 1.5
"""In which a card that was idle comes to the speed that it keeps."""

ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Call:
    """Something to be timed."""

    kind: Kind
    run: Callable[..., object]
    prepare: Callable[[], Any] | None = None
    """What `run` is given; not timed."""

    def __call__(self) -> None:
        """Do it without timing."""
        if self.prepare is None:
            self.run()
        else:
            self.run(self.prepare())


def soak(session: Session, calls: Sequence[Call], what: str, rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each call on the slowest rank, after at least two rounds, or as many as there is time for."""
    rounds = 2 if session.small else rounds
    mixture = Mixture(session)
    expected = []
    for number, call in enumerate(calls):
        if number % 16 == 0:
            session.tell(f"{what}: first calls", number / len(calls))
        expected.append(_first_times(session, call))
    if session.on_gpu:
        mixture.issue(SETTLE_S)
        session.wait()
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds):
        order = list(range(len(calls)))
        random.Random(number).shuffle(order)  # noqa: S311 (no secret; all ranks draw the same)
        marks = []
        for done, which in enumerate(order):
            call = calls[which]
            given = () if call.prepare is None else (call.prepare(),)
            before = session.mark()
            call.run(*given)
            marks.append((which, before, session.mark()))
            mixture.add(call.kind, expected[which])
            if done % 64 == 0:
                session.tell(what, (number + done / len(order)) / rounds)
        session.wait()
        for which, before, after in marks:
            times[which].append(before.until(after))
        if number >= 1 and session.is_late():
            break
    return session.worst([statistics.median(one) for one in times])


def _first_times(session: Session, call: Call) -> float:
    """About what it takes, from the second call: the first loads kernels."""
    call()
    given = () if call.prepare is None else (call.prepare(),)
    session.wait()
    before = session.mark()
    call.run(*given)
    after = session.mark()
    session.wait()
    return before.until(after)


class Mixture:
    """Runs between what is timed whatever lacks most to a step's shares."""

    def __init__(self, session: Session) -> None:
        self.session = session
        tokens, features = (64, 64) if session.small else (8192, 4096)
        heads = 4 if session.small else 32
        x, weight = session.random(tokens, features), session.random(2 * features, features)
        out = session.random(tokens, 2 * features)
        q, k, v = (session.random(tokens // 2, 1, heads, features // heads) for _ in range(3))
        kernel = choose_kernel("auto", session.device)

        def product() -> Tensor:
            return torch.mm(x, weight.t(), out=out)

        def attention() -> Tensor:
            return attend(q, k, v, None, kernel)

        self.fillers: dict[Kind, Callable[[], Tensor]] = {
            "product": product,
            "attention": attention,
            "memory": lambda: swiglu(out),
        }
        with torch.no_grad():
            calls = {kind: Call(kind, filler) for kind, filler in self.fillers.items()}
            self.takes = {kind: _first_times(session, call) for kind, call in calls.items()}
        self.spent: Counter[Kind] = Counter()

    def add(self, kind: Kind, seconds: float) -> None:
        """Something of a kind was run: run what belongs to it."""
        self.spent[kind] += seconds  # type: ignore[assignment]
        total = self.spent[kind] / SHARES[kind]
        with torch.no_grad():
            for other, filler in self.fillers.items():
                while other != kind and self.spent[other] + self.takes[other] < SHARES[other] * total:
                    filler()
                    self.spent[other] += self.takes[other]  # type: ignore[assignment]
        if min(self.spent[other] / SHARES[other] for other in SHARES) > 1.0:
            self.spent.clear()

    def issue(self, seconds: float) -> None:
        """Give the device the mixture for about so long, and do not wait for it."""
        count = int(seconds * SHARES["product"] / self.takes["product"]) + 1
        for _ in range(count):
            self.fillers["product"]()
            self.add("product", self.takes["product"])

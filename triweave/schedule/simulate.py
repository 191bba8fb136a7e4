"""Prices a schedule: when every action starts and ends, given what each costs.

Exact for the model it states: a rank does one action at a time, in its order; an action starts when its rank is free
and what it receives has arrived; messages travel beside the computation, one at a time on each channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from triweave.errors import InputError, Problem
from triweave.schedule.actions import Action, Kind, PipelineSchedule
from triweave.schedule.check import describe_deadlock
from triweave.schedule.dataflow import dependency_order

_NEVER = float("inf")


class Span(NamedTuple):
    """One action in time, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds the action takes."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule in time, simulated or measured: `spans[p]` is what pipeline rank `p` did, first to last."""

    schedule: PipelineSchedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def total_s(self) -> float:
        """Seconds from the start of the step to the end of the last action."""
        return max((rank[-1].end_s for rank in self.spans if rank), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds each rank computes."""
        return tuple(sum(span.duration_s for span in rank) for rank in self.spans)

    @property
    def bubble_of_total(self) -> float:
        """Idle share of the ranks' time, from 0 to 1: (p - 1) / (m + p - 1) for 1F1B with equal stages."""
        available = self.total_s * len(self.spans)
        return 1.0 - sum(self.busy_s) / available if available else 0.0

    @property
    def bubble_of_compute(self) -> float:
        """Idle time over computing time: (p - 1) / m for 1F1B with equal stages, the ratio that papers quote."""
        busy = sum(self.busy_s)
        return self.total_s * len(self.spans) / busy - 1.0 if busy else 0.0


def simulate(
    schedule: PipelineSchedule,
    cost: Callable[[Action], float],
    transfer_s: float | Callable[[int, int], float] = 0.0,
) -> Timeline:
    """When every action starts and ends.

    Written flat, on lists instead of `dataflow`'s results, because a planner runs it for every candidate: one pass,
    O(actions). A test holds it to the dependencies that `dataflow` states.

    Args:
        schedule: What each rank does, in which order.
        cost: Seconds that an action computes.
        transfer_s: Seconds that one message takes between two ranks: a number, or a function of the virtual stage
            that sends and the one that receives. A neighbouring stage on the same rank costs nothing.

    Raises:
        InputError: the schedule deadlocks; the message names the ranks and the actions.
    """
    forward, backward_weight = Kind.FORWARD, Kind.BACKWARD_WEIGHT
    pp, last = schedule.pp, schedule.num_stages - 1
    # When the input of an action is there, by stage and micro-batch. The last stage makes its own gradient.
    activation_at, gradient_at, put_off_at = (
        [[_NEVER] * schedule.num_micro_batches for _ in range(schedule.num_stages)] for _ in range(3)
    )
    activation_at[0] = [0.0] * schedule.num_micro_batches
    activation_link_free_at, gradient_link_free_at = [0.0] * pp, [0.0] * pp
    spans: list[list[Span]] = [[] for _ in range(pp)]
    free_at = [0.0] * pp
    ready = list(range(pp))
    waits = [False] * pp

    def deliver(inbox: list[list[float]], link_free_at: list[float], action: Action, reader: int, end: float) -> None:
        source, destination = action.stage % pp, reader % pp
        if source != destination:
            seconds = transfer_s(action.stage, reader) if callable(transfer_s) else transfer_s
            link_free_at[source] = end = max(end, link_free_at[source]) + seconds
        inbox[reader][action.micro_batch] = end
        if waits[destination]:
            waits[destination] = False
            ready.append(destination)

    while ready:
        rank = ready.pop()
        done, actions = spans[rank], schedule.ranks[rank]
        while len(done) < len(actions):
            action = actions[len(done)]
            kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
            inbox = activation_at if kind is forward else put_off_at if kind is backward_weight else gradient_at
            arrival = inbox[stage][micro_batch]
            if arrival == _NEVER:
                waits[rank] = True
                break
            start = max(free_at[rank], arrival)
            free_at[rank] = end = start + cost(action)
            done.append(Span(action, start, end))
            if kind is forward:
                if stage < last:
                    deliver(activation_at, activation_link_free_at, action, stage + 1, end)
                else:
                    gradient_at[stage][micro_batch] = end
            elif kind is not backward_weight:
                put_off_at[stage][micro_batch] = end
                if stage > 0:
                    deliver(gradient_at, gradient_link_free_at, action, stage - 1, end)
    if any(waits):
        _, stuck = dependency_order(schedule)
        raise InputError(Problem("schedule", schedule.name, describe_deadlock(schedule, stuck)))
    return Timeline(schedule, tuple(tuple(rank) for rank in spans))

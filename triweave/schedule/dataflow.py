"""What moves between the actions of a schedule: which result each one needs, makes, receives and sends.

Everything that runs a schedule (the checker, the simulator, the trainer) reads the dependencies here, so what is
proved about an order is proved about the messages that the trainer really exchanges. No clock and no tensor.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from triweave.schedule.actions import Action, Kind, PipelineSchedule

Payload = Literal["activation", "gradient"]


class Result(NamedTuple):
    """What an action leaves for others: the output of a stage, or the gradient of its input."""

    payload: Payload
    stage: int
    """The virtual stage that made it."""
    micro_batch: int

    @property
    def reader(self) -> int:
        """The virtual stage that needs it next; outside the pipeline at its two ends."""
        return self.stage + 1 if self.payload == "activation" else self.stage - 1


class Channel(NamedTuple):
    """A one-way link between two pipeline ranks for one payload. Messages leave it in the order they entered."""

    payload: Payload
    source: int
    """Pipeline rank that sends."""
    destination: int
    """Pipeline rank that receives."""

    def __str__(self) -> str:
        return f"{self.payload}s from rank {self.source} to rank {self.destination}"


class Message(NamedTuple):
    """One result on its way over a channel."""

    channel: Channel
    result: Result


def needs(action: Action, num_stages: int) -> tuple[Result, ...]:
    """Results that must exist before `action` can start, whichever rank makes them."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind is Kind.FORWARD:
        return (Result("activation", stage - 1, micro_batch),) if stage > 0 else ()
    if kind is Kind.BACKWARD_WEIGHT:
        return (Result("gradient", stage, micro_batch),)
    own = Result("activation", stage, micro_batch)
    return (own, Result("gradient", stage + 1, micro_batch)) if stage + 1 < num_stages else (own,)


def makes(action: Action) -> Result | None:
    """What `action` leaves for others; a weight gradient stays where it is."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    return Result("activation" if action.kind is Kind.FORWARD else "gradient", action.stage, action.micro_batch)


def receives(schedule: PipelineSchedule, action: Action) -> Message | None:
    """The message that the rank of `action` must take in first; None if all it needs is already on that rank.

    With one pipeline rank, or at the ends of the pipeline, nothing is received: a neighbouring stage on the same
    rank hands its result over in memory.
    """
    for result in needs(action, schedule.num_stages):
        if result.stage % schedule.pp != action.stage % schedule.pp:
            return Message(Channel(result.payload, result.stage % schedule.pp, action.stage % schedule.pp), result)
    return None


def sends(schedule: PipelineSchedule, action: Action) -> Message | None:
    """The message that `action` gives rise to; None if its result stays on its rank or nobody needs it."""
    result = makes(action)
    if result is None:
        return None
    source, destination = result.stage % schedule.pp, result.reader % schedule.pp
    if not 0 <= result.reader < schedule.num_stages or source == destination:
        return None
    return Message(Channel(result.payload, source, destination), result)


def channels(schedule: PipelineSchedule) -> tuple[Channel, ...]:
    """Every channel of the pipeline, sorted: the same list in the same order on every rank.

    Two payloads between the same two ranks are two channels, so that a gradient never queues behind an activation.
    """
    links: set[Channel] = set()
    for stage in range(schedule.num_stages - 1):
        here, there = stage % schedule.pp, (stage + 1) % schedule.pp
        if here != there:
            links |= {Channel("activation", here, there), Channel("gradient", there, here)}
    return tuple(sorted(links))


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that can never go on."""

    rank: int
    position: int
    """Index, in the rank's list, of the action that cannot start."""
    missing: Result
    """What that action waits for in vain."""


def dependency_order(schedule: PipelineSchedule) -> tuple[list[tuple[int, Action]], list[Stuck]]:
    """Run every rank's list, each action waiting for what it needs, sends never waiting.

    Returns:
        The (rank, action) pairs in an order in which every need comes first, and the ranks that are left waiting
        for each other: an empty list exactly if the schedule cannot deadlock. O(actions).
    """
    num_stages = schedule.num_stages
    order: list[tuple[int, Action]] = []
    made: set[Result] = set()
    position = [0] * schedule.pp
    waiting: defaultdict[Result, list[int]] = defaultdict(list)
    ready = deque(range(schedule.pp))
    while ready:
        rank = ready.popleft()
        actions = schedule.ranks[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = [result for result in needs(action, num_stages) if result not in made]
            if missing:
                waiting[missing[0]].append(rank)
                break
            order.append((rank, action))
            position[rank] += 1
            result = makes(action)
            if result is not None:
                made.add(result)
                ready.extend(waiting.pop(result, ()))
    stuck = [Stuck(rank, position[rank], missing) for missing, ranks in waiting.items() for rank in ranks]
    return order, sorted(stuck, key=lambda one: one.rank)

"""Proves a schedule: complete, free of deadlock, messages received in the order they were sent; bounds what is held.

Looks at the order alone. Times are the simulator's business.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from triweave.schedule.actions import Action, Kind, PipelineSchedule
from triweave.schedule.dataflow import Channel, Result, Stuck, dependency_order, makes, receives, sends


def check_schedule(schedule: PipelineSchedule) -> list[str]:
    """Everything that is wrong with `schedule`, one sentence each; an empty list is a proof that it runs.

    Checked: every action is there exactly once, on the rank that owns its stage; the ranks, waiting for what they
    need, never wait for each other in a circle; on every channel the receiver takes messages in the order in which
    the sender sends them. The last two are looked at only when the first holds.
    """
    problems = list(_incomplete(schedule))
    if problems:
        return problems
    _, stuck = dependency_order(schedule)
    return [*([describe_deadlock(schedule, stuck)] if stuck else ()), *_out_of_order(schedule)]


def _incomplete(schedule: PipelineSchedule) -> Iterator[str]:
    """Actions that are missing, repeated, on the wrong rank, or of no stage or micro-batch of this schedule."""
    stages, micro_batches = range(schedule.num_stages), range(schedule.num_micro_batches)
    counts: Counter[Action] = Counter()
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            owner = action.stage % schedule.pp
            if action.stage not in stages or action.micro_batch not in micro_batches:
                sizes = f"{len(stages)} stages and {len(micro_batches)} micro-batches"
                yield f"rank {rank} does {action}, but there are {sizes}"
            elif owner != rank:
                yield f"rank {rank} does {action}, but stage {action.stage} is on rank {owner}"
            counts[action] += 1
    for action, count in counts.items():
        if count > 1:
            yield f"{action} is done {count} times"
    for stage in stages:
        for micro_batch in micro_batches:
            done = {kind for kind in Kind if Action(kind, stage, micro_batch) in counts}
            split = bool(done & {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
            if split and Kind.BACKWARD in done:
                yield f"the backward of stage {stage}, micro-batch {micro_batch} is done both whole and in halves"
            backward = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT} if split else {Kind.BACKWARD}
            for kind in Kind:
                if kind in {Kind.FORWARD, *backward} - done:
                    yield f"rank {stage % schedule.pp} never does {Action(kind, stage, micro_batch)}"


def describe_deadlock(schedule: PipelineSchedule, stuck: Sequence[Stuck]) -> str:
    """One circle of ranks that wait for each other: which action each is at, and which one it waits for."""
    by_rank = {one.rank: one for one in stuck}
    path: list[Stuck] = []
    one: Stuck | None = stuck[0]
    while one is not None and one not in path:
        path.append(one)
        one = by_rank.get(one.missing.stage % schedule.pp)
    circle = path[path.index(one) :] if one is not None else path
    return "deadlock: " + "; ".join(_waits(schedule, one) for one in circle)


def _waits(schedule: PipelineSchedule, one: Stuck) -> str:
    """What a stuck rank is at, and what it waits for."""
    action, owner = schedule.ranks[one.rank][one.position], one.missing.stage % schedule.pp
    maker = next((other for other in schedule.ranks[owner] if makes(other) == one.missing), None)
    if maker is None:
        payload, stage, micro_batch = one.missing
        wanted = f"the {payload} of stage {stage}, micro-batch {micro_batch}, which nobody makes"
        return f"rank {one.rank} at {action} waits for {wanted}"
    if owner == one.rank:
        return f"rank {one.rank} is to do {action} before {maker}, which it needs"
    return f"rank {one.rank} at {action} waits for {maker} of rank {owner}"


def _out_of_order(schedule: PipelineSchedule) -> Iterator[str]:
    """Channels on which the sender's order and the receiver's differ, with the first message that does."""
    sent: defaultdict[Channel, list[Result]] = defaultdict(list)
    received: defaultdict[Channel, list[Result]] = defaultdict(list)
    for actions in schedule.ranks:
        for action in actions:
            if (incoming := receives(schedule, action)) is not None:
                received[incoming.channel].append(incoming.result)
            if (outgoing := sends(schedule, action)) is not None:
                sent[outgoing.channel].append(outgoing.result)
    for channel in sorted(sent):
        for i, (left, right) in enumerate(zip(sent[channel], received[channel], strict=True)):
            if left != right:
                yield (
                    f"{channel}: message {i + 1} is stage {left.stage}, micro-batch {left.micro_batch} where it is "
                    f"sent and stage {right.stage}, micro-batch {right.micro_batch} where it is received"
                )
                break


def peak_held(
    schedule: PipelineSchedule,
    activations: Callable[[int], float],
    put_off: Callable[[int], float],
) -> tuple[float, ...]:
    """The most that each rank holds at once for micro-batches on their way.

    Args:
        schedule: A schedule that `check_schedule` finds nothing wrong with.
        activations: What one micro-batch holds on a virtual stage from its forward to the end of its backward, or
            of its input gradient where the backward is split; bytes, or any unit.
        put_off: What stays from the end of the input gradient to the end of the weight gradient; same unit.
    """
    peaks = []
    for actions in schedule.ranks:
        held = peak = 0.0
        for action in actions:
            if action.kind is Kind.FORWARD:
                held += activations(action.stage)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                held -= put_off(action.stage)
            else:
                held -= activations(action.stage)
                if action.kind is Kind.BACKWARD_INPUT:
                    held += put_off(action.stage)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


@dataclass(frozen=True, slots=True)
class InFlight:
    """The most (virtual stage, micro-batch) pairs whose activations one rank holds at once."""

    until_input_gradient: int
    """Counted from the forward to the end of the backward, or of its input half."""
    until_weight_gradient: int
    """Counted to the end of the weight half where the backward is split; otherwise the same number."""


def in_flight(schedule: PipelineSchedule) -> tuple[InFlight, ...]:
    """What each rank holds at its peak, in pairs of a virtual stage and a micro-batch (a chunk, to Megatron).

    Divide by the virtual stages of a rank for micro-batches of the rank's full set of layers.
    """
    to_input = peak_held(schedule, activations=lambda stage: 1, put_off=lambda stage: 0)
    to_weight = peak_held(schedule, activations=lambda stage: 1, put_off=lambda stage: 1)
    return tuple(InFlight(int(i), int(w)) for i, w in zip(to_input, to_weight, strict=True))

"""The four pipeline orders, each a pure function of the numbers of ranks, virtual stages and micro-batches.

Every order runs the backward of a stage in micro-batch order, so gradients are summed in the same order whichever
schedule is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from triweave.errors import InputError, Problem, closest
from triweave.layout import Schedule
from triweave.schedule.actions import Action, Kind, PipelineSchedule


def build_schedule(name: Schedule, pp: int, vpp: int, num_micro_batches: int) -> PipelineSchedule:
    """The order in which each of `pp` pipeline ranks runs its `vpp` virtual stages over the micro-batches of a step.

    Raises:
        InputError: the numbers do not fit the schedule; see `schedule_problems`.
    """
    _refuse(name, pp, vpp, num_micro_batches)
    orders = tuple(_rank_order(name, rank, pp, vpp, num_micro_batches) for rank in range(pp))
    return PipelineSchedule(name, pp * vpp, num_micro_batches, orders)


def rank_order(name: Schedule, rank: int, pp: int, vpp: int, num_micro_batches: int) -> tuple[Action, ...]:
    """The same of one pipeline rank.

    Raises:
        InputError: as `build_schedule`.
    """
    _refuse(name, pp, vpp, num_micro_batches)
    return _rank_order(name, rank, pp, vpp, num_micro_batches)


def _refuse(name: Schedule, pp: int, vpp: int, num_micro_batches: int) -> None:
    problems = schedule_problems(name, pp, vpp, num_micro_batches)
    if problems:
        raise InputError(problems)


def _rank_order(name: Schedule, rank: int, pp: int, vpp: int, num_micro_batches: int) -> tuple[Action, ...]:
    if name == "gpipe":
        return gpipe(rank, num_micro_batches)
    if name == "1f1b":
        return one_forward_one_backward(rank, pp, num_micro_batches)
    if name == "interleaved":
        return interleaved(rank, pp, vpp, num_micro_batches)
    return zero_bubble(rank, pp, num_micro_batches)


def schedule_problems(name: str, pp: int, vpp: int, num_micro_batches: int) -> list[Problem]:
    """Everything that keeps a schedule from being built with these numbers; empty if it can be."""
    names = get_args(Schedule)
    problems = []
    if name not in names:
        problems.append(Problem("layout.schedule", name, f"must be one of {', '.join(names)}", closest(name, names)))
    for key, value in (("layout.pp", pp), ("layout.vpp", vpp)):
        if value < 1:
            problems.append(Problem(key, value, "must be at least 1", "1"))
    if problems:
        return problems
    if vpp > 1 and name != "interleaved":
        rule = f"only the interleaved schedule has {vpp} virtual stages a rank; {name} has 1"
        problems.append(Problem("layout.vpp", vpp, rule, "1"))
    micro_batches = ("micro-batches of a step", num_micro_batches)
    if num_micro_batches < pp:
        rule = f"must be at least the {pp} pipeline ranks: with fewer, the pipeline never fills"
        problems.append(Problem(*micro_batches, rule, str(pp)))
    elif name == "interleaved" and num_micro_batches % pp:
        below = num_micro_batches // pp * pp
        nearest = below if num_micro_batches - below <= pp // 2 else below + pp
        rule = f"the interleaved schedule takes them in groups of the {pp} pipeline ranks: must be a multiple of {pp}"
        problems.append(Problem(*micro_batches, rule, str(nearest)))
    return problems


def gpipe(rank: int, num_micro_batches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards (Huang et al. 1811.06965). Holds every micro-batch at once.

    The paper runs the backwards from the last micro-batch to the first; the time is the same.
    """
    micro_batches = range(num_micro_batches)
    return (
        *(Action(Kind.FORWARD, rank, k) for k in micro_batches),
        *(Action(Kind.BACKWARD, rank, k) for k in micro_batches),
    )


def one_forward_one_backward(rank: int, pp: int, num_micro_batches: int) -> tuple[Action, ...]:
    """A backward as soon as there is one to run (PipeDream-flush; Narayanan et al. 2104.04473, figure 3).

    The bubble is GPipe's; the micro-batches held are min(m, pp - rank) instead of m.
    """
    warm_up = min(num_micro_batches, pp - 1 - rank)
    forwards = [Action(Kind.FORWARD, rank, k) for k in range(num_micro_batches)]
    backwards = [Action(Kind.BACKWARD, rank, k) for k in range(num_micro_batches)]
    return tuple(_alternate(forwards, backwards, warm_up))


def interleaved(rank: int, pp: int, vpp: int, num_micro_batches: int) -> tuple[Action, ...]:
    """1F1B over `vpp` virtual stages a rank (Narayanan et al. 2104.04473, figure 4, in Megatron-LM's order).

    Micro-batches travel in groups of `pp`: a group passes the rank's first virtual stage, then its second, and so
    on, before the next group enters. The bubble is 1/vpp of 1F1B's. A warm-up of two more virtual stages for each
    rank that follows gives every message one action's time to travel.
    """
    forwards = [
        Action(Kind.FORWARD, chunk * pp + rank, group + k)
        for group in range(0, num_micro_batches, pp)
        for chunk in range(vpp)
        for k in range(pp)
    ]
    backwards = [
        Action(Kind.BACKWARD, chunk * pp + rank, group + k)
        for group in range(0, num_micro_batches, pp)
        for chunk in reversed(range(vpp))
        for k in range(pp)
    ]
    warm_up = min(len(forwards), (vpp - 1) * pp + 2 * (pp - 1 - rank))
    return tuple(_alternate(forwards, backwards, warm_up))


def zero_bubble(rank: int, pp: int, num_micro_batches: int) -> tuple[Action, ...]:
    """1F1B whose weight gradients wait until the rank would be idle: ZB-H1 of Qi et al. (2401.10241, figure 3).

    Rank i runs the weight gradient of a micro-batch i micro-batches after its input gradient. The later a rank
    starts, the more weight gradients it has put off, and it ends with them while earlier ranks still wait for
    input gradients. No rank ever holds more than `pp` micro-batches, 1F1B's most. The bubble is
    (pp - 1)(T_F + T_I - T_W) while T_W is the shortest of the three, and in general
    (pp - 1) max(T_F + T_I - T_W, T_F, T_I).
    """
    forwards = [Action(Kind.FORWARD, rank, k) for k in range(num_micro_batches)]
    backwards = [Action(Kind.BACKWARD_INPUT, rank, k) for k in range(num_micro_batches)]
    order: list[Action] = []
    for action in _alternate(forwards, backwards, min(num_micro_batches, pp - 1 - rank)):
        order.append(action)
        if action.kind is Kind.BACKWARD_INPUT and action.micro_batch >= rank:
            order.append(Action(Kind.BACKWARD_WEIGHT, rank, action.micro_batch - rank))
    put_off = range(max(0, num_micro_batches - rank), num_micro_batches)
    return (*order, *(Action(Kind.BACKWARD_WEIGHT, rank, k) for k in put_off))


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> Iterator[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    yield from forwards[:warm_up]
    steady = len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
        yield forward
        yield backward
    yield from backwards[steady:]

"""The length of a pipeline's step, exactly as `schedule.simulate` prices it, fast enough for a search.

An order depends on the schedule and three numbers alone, so it is laid out once as a flat list of operations, each
with the one whose result it waits for. A step with many micro-batches repeats itself: it is priced for a few and
continued by the slope where that is one below which no longer step can fall, else for many and continued by theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from triweave.layout import Schedule
from triweave.schedule import Kind, PipelineSchedule, build_schedule
from triweave.schedule.build import one_forward_one_backward

_LONG = 48
"""Periods after which a step's slope is taken for settled whatever it is."""
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one micro-batch on one virtual stage."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward_input + self.backward_weight

    def times(self, factor: float) -> StageCost:
        """Each of them so often."""
        return StageCost(self.forward * factor, self.backward_input * factor, self.backward_weight * factor)

    def of(self, kind: Kind) -> float:
        """Seconds of one action."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.BACKWARD_INPUT:
            return self.backward_input
        if kind is Kind.BACKWARD_WEIGHT:
            return self.backward_weight
        return self.backward_input + self.backward_weight


def pipeline_s(
    schedule: Schedule,
    pp: int,
    vpp: int,
    micro_batches: int,
    costs: Sequence[StageCost],
    transfer_s: float,
    hosts: Sequence[StageCost] = (),
) -> float:
    """Seconds from the first forward to the last action of the slowest rank.

    Args:
        schedule: which order.
        pp: pipeline ranks.
        vpp: virtual stages a rank.
        micro_batches: of a step.
        costs: one for every virtual stage, in model order.
        transfer_s: one message between neighbouring ranks.
        hosts: what the host needs to issue each; it runs ahead of the GPU, and an action ends when all of it was
            issued at the earliest. Empty where it is never waited for.

    Raises:
        InputError: the numbers do not fit the schedule.
    """
    if not is_waited_for(hosts, costs):
        hosts = ()
    if pp == 1:
        return _alone_s(micro_batches, costs, hosts)
    slope, period = _slope(schedule, pp, vpp, costs, transfer_s)
    if hosts:
        slope = max(slope, *(sum(host.total for host in hosts[rank::pp]) for rank in range(pp)))
    # A circle through several ranks may take a while to overtake the slowest one.
    few = 4 * pp if schedule == "interleaved" else 3 * pp if period == 1 else 8 * pp
    if micro_batches > few + period:
        few += (micro_batches - few) % period
        first = _priced(schedule, pp, vpp, few - period, costs, transfer_s, hosts)
        second = _priced(schedule, pp, vpp, few, costs, transfer_s, hosts)
        if abs(second - first - period * slope) <= 1e-9 * second:
            return second + (micro_batches - few) * slope
    # Half of them must still fill the pipeline.
    periods = max(_LONG, -(-2 * pp // period))
    many = periods * period + micro_batches % period
    if micro_batches > 2 * many:
        # The slope is none that is known: it is read off where the start is long forgotten.
        first = _priced(schedule, pp, vpp, many - periods // 2 * period, costs, transfer_s, hosts)
        second = _priced(schedule, pp, vpp, many, costs, transfer_s, hosts)
        return second + (micro_batches - many) * (second - first) / (periods // 2 * period)
    return _priced(schedule, pp, vpp, micro_batches, costs, transfer_s, hosts)


def is_waited_for(hosts: Sequence[StageCost], costs: Sequence[StageCost]) -> bool:
    """Whether any action takes a host longer to issue than it takes itself."""
    return any(host.of(kind) > cost.of(kind) for host, cost in zip(hosts, costs, strict=False) for kind in _KINDS)


def least_pipeline_s(
    schedule: Schedule,
    pp: int,
    micro_batches: int,
    costs: Sequence[StageCost],
    transfer_s: float,
    hosts: Sequence[StageCost] = (),
) -> float:
    """Seconds that no order of the schedule's actions can undercut; what 1F1B takes where all stages are equal.

    A rank waits for the first activation to come through the stages before it, does its own work, and its last
    gradient goes back through those stages. In a zero-bubble order weight halves may follow that gradient.
    """
    if pp == 1:
        return _alone_s(micro_batches, costs, hosts)
    split = schedule == "zero-bubble"
    least = before = after = 0.0
    totals = [cost.total for cost in costs]
    for rank in range(pp):
        busy = micro_batches * sum(totals[rank::pp])
        least = max(least, before + busy + (0.0 if split else after))
        if split:
            put_off = micro_batches * costs[rank].backward_weight
            least = max(least, before + busy - put_off + after)
        before += costs[rank].forward + transfer_s
        after += costs[rank].backward_input + transfer_s + (0.0 if split else costs[rank].backward_weight)
        if hosts:
            least = max(least, micro_batches * sum(host.total for host in hosts[rank::pp]))
    return least


def _slope(schedule: Schedule, pp: int, vpp: int, costs: Sequence[StageCost], transfer_s: float) -> tuple[float, int]:
    """Seconds that one more micro-batch adds in the long run, and after how many of them the order repeats itself.

    The slope is the largest mean of all circles of dependencies (Baccelli et al., Synchronization and Linearity). One
    circle is a rank's own work. In 1F1B a micro-batch that has gone from rank i to rank j and back lets rank i start
    another one, j - i + 1 later. Of the interleaved order only the first kind is known here.
    """
    if schedule == "interleaved":
        return max(sum(costs[stage].total for stage in range(rank, pp * vpp, pp)) for rank in range(pp)), pp
    if schedule == "gpipe":
        backward = max(cost.backward_input + cost.backward_weight for cost in costs)
        return max(transfer_s, *(cost.forward for cost in costs)) + max(backward, transfer_s), 1
    best, period = max(transfer_s, *(cost.total for cost in costs)), 1
    for first in range(pp):
        # Zero-bubble puts the weight half of the rank that the circle returns to between its micro-batches.
        around = costs[first].backward_weight if schedule == "zero-bubble" else 0.0
        for last in range(first, pp):
            cost = costs[last]
            around += cost.forward + cost.backward_input + (0.0 if schedule == "zero-bubble" else cost.backward_weight)
            length = last - first + 1
            mean = (around + 2 * (last - first) * transfer_s) / length
            if mean > best * (1 + 1e-12):
                best, period = mean, length
    return best, period


def _alone_s(micro_batches: int, costs: Sequence[StageCost], hosts: Sequence[StageCost]) -> float:
    """Without a pipeline: what was issued up to some action, and the GPU's time of all after it, where that is most.

    Actions repeat themselves, so it is most before or after the first forward, or that of the last micro-batch.
    """
    gpu, host = micro_batches * sum(cost.total for cost in costs), micro_batches * sum(one.total for one in hosts)
    if not hosts:
        return gpu
    forward = sum(one.forward - cost.forward for one, cost in zip(hosts, costs, strict=True))
    backward = sum(cost.of(Kind.BACKWARD) - one.of(Kind.BACKWARD) for one, cost in zip(hosts, costs, strict=True))
    return max(gpu + max(0.0, forward), host + max(0.0, backward))


def _priced(
    schedule: Schedule,
    pp: int,
    vpp: int,
    micro_batches: int,
    costs: Sequence[StageCost],
    transfer_s: float,
    hosts: Sequence[StageCost],
) -> float:
    program = _program(schedule, pp, vpp, micro_batches)
    seconds = [cost.of(kind) for cost in costs for kind in _KINDS]
    issuing = [host.of(kind) for host in hosts for kind in _KINDS] or [0.0] * len(seconds)
    issued = [0.0] * pp
    ends = [0.0] * (len(program) + 1)
    free = [0.0] * pp
    links = [0.0] * (2 * pp)
    for i, (rank, cost, source, link) in enumerate(program, 1):
        ready = ends[source]
        if link >= 0:
            # A message leaves when its link is free: ends[] of the sender is when it was made.
            sent = links[link]
            ready = (ready if ready > sent else sent) + transfer_s
            links[link] = ready
        start = free[rank]
        if ready > start:
            start = ready
        end = start + seconds[cost]
        issued[rank] += issuing[cost]
        if issued[rank] > end:
            end = issued[rank]
        ends[i] = free[rank] = end
    return max(free)


def _order(schedule: Schedule, pp: int, vpp: int, micro_batches: int) -> PipelineSchedule:
    if schedule == "1f1b" and vpp == 1:
        # Straight from its builder: Megatron runs it with fewer micro-batches than ranks, which our rules refuse.
        ranks = tuple(one_forward_one_backward(rank, pp, micro_batches) for rank in range(pp))
        return PipelineSchedule(schedule, pp, micro_batches, ranks)
    return build_schedule(schedule, pp, vpp, micro_batches)


@lru_cache(maxsize=256)
def _program(schedule: Schedule, pp: int, vpp: int, micro_batches: int) -> tuple[tuple[int, int, int, int], ...]:
    """Operations in an order in which each follows what it waits for: `(rank, cost, source, link)`.

    `source` is the position (from 1) of the operation whose result it needs, 0 where there is none; `link` the
    channel the result travels on, -1 if it stays on the rank.
    """
    order = _order(schedule, pp, vpp, micro_batches)
    last = order.num_stages - 1
    program: list[tuple[int, int, int, int]] = []
    given = [0] * micro_batches
    # Positions of forwards and of backwards, or their input halves, by stage and micro-batch; 0 is not laid out yet.
    forwards, backwards = ([[0] * micro_batches for _ in range(order.num_stages)] for _ in range(2))
    # A rank's own order is kept, so that every link, which has one reader, keeps that of its messages.
    queues = [deque(actions) for actions in order.ranks]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, micro_batch = queue[0].kind, queue[0].stage, queue[0].micro_batch
                link, needed = -1, given
                if kind is Kind.BACKWARD_WEIGHT:
                    needed = backwards[stage]
                elif kind is not Kind.FORWARD:
                    needed = forwards[last]
                    if stage < last:
                        link, needed = pp + (stage + 1) % pp, backwards[stage + 1]
                elif stage > 0:
                    link, needed = (stage - 1) % pp, forwards[stage - 1]
                source = needed[micro_batch]
                if not source and needed is not given:
                    break
                queue.popleft()
                program.append((rank, stage * len(_KINDS) + _KINDS.index(kind), source, link))
                if kind is not Kind.BACKWARD_WEIGHT:
                    (forwards if kind is Kind.FORWARD else backwards)[stage][micro_batch] = len(program)
    return tuple(program)

"""The simulator, held to a fixed point of the equations it claims to solve."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.errors import InputError
from triweave.schedule import Action, Channel, Kind, PipelineSchedule, build_schedule, receives, sends, simulate

SCHEDULES = [
    build_schedule("gpipe", 3, 1, 4),
    build_schedule("1f1b", 4, 1, 6),
    build_schedule("interleaved", 2, 3, 4),
    build_schedule("interleaved", 1, 2, 3),
    build_schedule("zero-bubble", 4, 1, 5),
]


def earliest_starts(
    schedule: PipelineSchedule, cost: dict[Action, float], transfer_s: dict[tuple[int, int], float]
) -> dict[Action, float]:
    """Start times by relaxing every equation until none moves: slow, and with no order of events to get wrong."""
    start = {action: 0.0 for rank in schedule.ranks for action in rank}
    while True:
        before = dict(start)
        arrival: dict[object, float] = {}
        for rank in schedule.ranks:
            link: dict[Channel, float] = {}
            for action in rank:
                if (message := sends(schedule, action)) is not None:
                    end = max(start[action] + cost[action], link.get(message.channel, 0.0))
                    link[message.channel] = end + transfer_s[action.stage, message.result.reader]
                    arrival[message] = link[message.channel]
        for rank in schedule.ranks:
            free = 0.0
            for action in rank:
                message = receives(schedule, action)
                start[action] = max(free, arrival[message] if message is not None else 0.0)
                free = start[action] + cost[action]
        if start == before:
            return start


@given(st.sampled_from(SCHEDULES), st.randoms(), st.sampled_from([0.0, 0.3, 5.0]))
def test_starts_equal_the_fixed_point(schedule: PipelineSchedule, rng: random.Random, slowest_link: float) -> None:
    """With uneven actions and links, also links slower than the computation, every start is the earliest possible."""
    cost = {action: rng.uniform(0.5, 2.0) for rank in schedule.ranks for action in rank}
    stages = range(schedule.num_stages)
    transfer = {(i, j): rng.uniform(0.0, slowest_link) for i in stages for j in (i - 1, i + 1)}
    timeline = simulate(schedule, cost.__getitem__, lambda source, reader: transfer[source, reader])
    expected = earliest_starts(schedule, cost, transfer)
    for rank, spans in enumerate(timeline.spans):
        assert tuple(span.action for span in spans) == schedule.ranks[rank]
        for span in spans:
            assert span.start_s == pytest.approx(expected[span.action])
            assert span.duration_s == pytest.approx(cost[span.action])


def test_busy_total_and_bubbles_agree() -> None:
    """Two stages, two micro-batches, forward 1 s and backward 2 s: 9 s long, 6 s of work a rank."""
    timeline = simulate(build_schedule("1f1b", 2, 1, 2), lambda action: 1.0 if action.kind is Kind.FORWARD else 2.0)
    assert timeline.total_s == 9.0
    assert timeline.busy_s == (6.0, 6.0)
    assert timeline.bubble_of_total == pytest.approx(1 / 3)
    assert timeline.bubble_of_compute == pytest.approx(1 / 2)


def test_uneven_stages_are_paced_by_the_slowest() -> None:
    """The slow middle stage of three works 7 x 9 s, waits 1 s for its first input, 3 s for its first gradient, and
    the first stage's last backward takes 2 s after it."""
    forward = (1.0, 3.0, 2.0)
    timeline = simulate(
        build_schedule("1f1b", 3, 1, 7),
        lambda action: forward[action.stage] * (1 if action.kind is Kind.FORWARD else 2),
    )
    assert timeline.total_s == 63 + 1 + 3 + 2


def test_transfer_delays_each_hop() -> None:
    """One micro-batch on two stages pays the link once forth and once back."""
    schedule = PipelineSchedule(
        "one",
        2,
        1,
        (
            (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)),
            (Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 1, 0)),
        ),
    )
    assert simulate(schedule, lambda action: 1.0, transfer_s=0.25).total_s == 4.5


def test_stages_of_one_rank_transfer_nothing() -> None:
    """Neighbouring virtual stages on one rank hand over in memory, however slow the links."""
    timeline = simulate(build_schedule("interleaved", 1, 4, 3), lambda action: 1.0, transfer_s=1e9)
    assert timeline.total_s == 24.0
    assert timeline.bubble_of_total == 0.0


def test_a_slow_link_sends_one_message_at_a_time() -> None:
    """When a message takes longer than a forward, the link paces the pipeline."""
    timeline = simulate(
        build_schedule("gpipe", 2, 1, 4), lambda action: 1.0, lambda source, _: 3.0 if source == 0 else 0
    )
    assert [span.start_s for span in timeline.spans[1][:4]] == [4.0, 7.0, 10.0, 13.0]


def test_deadlock_is_an_input_error() -> None:
    """A schedule that cannot finish is refused with the circle named."""
    good = build_schedule("1f1b", 2, 1, 2)
    bad = replace(good, ranks=(tuple(reversed(good.ranks[0])), good.ranks[1]))
    with pytest.raises(InputError, match=r"deadlock: rank 0 is to do B0\.1 before F0\.1, which it needs"):
        simulate(bad, lambda action: 1.0)


def test_missing_action_is_an_input_error() -> None:
    """A rank that waits for a result nobody makes is told so."""
    good = build_schedule("1f1b", 2, 1, 2)
    bad = replace(good, ranks=(good.ranks[0][1:], good.ranks[1]))
    with pytest.raises(InputError, match="activation of stage 0, micro-batch 0, which nobody makes"):
        simulate(bad, lambda action: 1.0)


def test_a_large_pipeline_is_quick() -> None:
    """64 ranks and 256 micro-batches, 49,152 actions, take well under a second of this process's own time."""
    schedule = build_schedule("zero-bubble", 64, 1, 256)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        timeline = simulate(schedule, lambda action: 1.0)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5
    assert timeline.total_s == 3 * 256 + 63

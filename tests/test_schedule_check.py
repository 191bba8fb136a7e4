"""The checker, held to planted faults and to a real execution over first-in first-out queues."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from triweave.schedule import (
    Action,
    Channel,
    Kind,
    PipelineSchedule,
    build_schedule,
    channels,
    check_schedule,
    in_flight,
    peak_held,
    receives,
    sends,
)
from triweave.schedule.dataflow import dependency_order

SMALL = [
    build_schedule("gpipe", 3, 1, 4),
    build_schedule("1f1b", 4, 1, 5),
    build_schedule("interleaved", 2, 2, 4),
    build_schedule("interleaved", 3, 3, 6),
    build_schedule("interleaved", 1, 3, 3),
    build_schedule("zero-bubble", 3, 1, 5),
]

CIRCLE = ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
"""Rank 0 wants the first gradient before it sends the second activation; rank 1 the other way round."""
MISORDERED = ("F0.0 F0.1 B0.0 B0.1", "F1.1 F1.0 B1.0 B1.1")
"""Rank 1 takes the activations in another order than rank 0 sends them."""


def with_rank(schedule: PipelineSchedule, rank: int, actions: list[Action]) -> PipelineSchedule:
    """`schedule` with another list for one rank."""
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return replace(schedule, ranks=tuple(ranks))


def parse(*ranks: str) -> tuple[tuple[Action, ...], ...]:
    """Actions from how they print, `F0.1 B0.1`, a string a rank."""

    def action(word: str) -> Action:
        stage, micro_batch = word[1:].split(".")
        return Action(Kind(word[0]), int(stage), int(micro_batch))

    return tuple(tuple(map(action, rank.split())) for rank in ranks)


def runs(schedule: PipelineSchedule) -> bool:
    """Whether the ranks, as tasks that receive from FIFO queues and block, all reach their end with the right data.

    Knows nothing of `dataflow`: what is received and sent is written out here.
    """
    pp, last = schedule.pp, schedule.num_stages - 1

    async def run_rank(actions: tuple[Action, ...], queues: dict[tuple[str, int, int], asyncio.Queue[object]]) -> None:
        done: set[tuple[str, int, int]] = set()

        async def take(payload: str, source: int, stage: int, micro_batch: int) -> None:
            if source % pp == stage % pp:
                assert (payload, source, micro_batch) in done
                return
            arrived = await queues.setdefault((payload, source % pp, stage % pp), asyncio.Queue()).get()
            assert arrived == (source, micro_batch)

        for action in actions:
            kind, stage, k = action.kind.value, action.stage, action.micro_batch
            if kind == "F":
                if stage > 0:
                    await take("activation", stage - 1, stage, k)
                done.add(("activation", stage, k))
                if stage < last and pp > 1:
                    link = ("activation", stage % pp, (stage + 1) % pp)
                    queues.setdefault(link, asyncio.Queue()).put_nowait((stage, k))
            elif kind == "W":
                assert ("gradient", stage, k) in done
            else:
                assert ("activation", stage, k) in done
                if stage < last:
                    await take("gradient", stage + 1, stage, k)
                done.add(("gradient", stage, k))
                if stage > 0 and pp > 1:
                    link = ("gradient", stage % pp, (stage - 1) % pp)
                    queues.setdefault(link, asyncio.Queue()).put_nowait((stage, k))

    async def run_all() -> bool:
        queues: dict[tuple[str, int, int], asyncio.Queue[object]] = {}
        tasks = [asyncio.create_task(run_rank(actions, queues)) for actions in schedule.ranks]
        # Each turn of the loop moves every task that can move: after as many turns as actions, who waits waits forever.
        for _ in range(2 * sum(map(len, schedule.ranks)) + 2):
            await asyncio.sleep(0)
        good = all(task.done() and task.exception() is None for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return good

    return asyncio.run(run_all())


@given(st.sampled_from(SMALL), st.randoms(), st.integers(0, 3))
def test_verdict_equals_a_real_execution(schedule: PipelineSchedule, rng: random.Random, num_swaps: int) -> None:
    """After random swaps inside the ranks' lists, the checker says yes exactly if blocking tasks run to the end."""
    for _ in range(num_swaps):
        rank = rng.randrange(schedule.pp)
        actions = list(schedule.ranks[rank])
        i = rng.randrange(len(actions))
        j = min(len(actions) - 1, i + rng.randint(1, 3))
        actions[i], actions[j] = actions[j], actions[i]
        schedule = with_rank(schedule, rank, actions)
    assert (check_schedule(schedule) == []) == runs(schedule)


def test_the_execution_itself_can_fail() -> None:
    """The oracle above tells a good order from a deadlock."""
    assert runs(build_schedule("1f1b", 2, 1, 2))
    assert not runs(PipelineSchedule("circle", 2, 2, parse(*CIRCLE)))
    assert not runs(PipelineSchedule("misordered", 2, 2, parse(*MISORDERED)))


def test_deadlock_by_a_swap_is_found_and_named() -> None:
    """A rank whose backward was swapped before its own forward waits for itself."""
    schedule = build_schedule("1f1b", 2, 1, 3)
    assert " ".join(map(str, schedule.ranks[0])) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    swapped = with_rank(schedule, 0, [schedule.ranks[0][i] for i in (0, 4, 2, 3, 1, 5)])
    assert check_schedule(swapped)[0] == "deadlock: rank 0 is to do B0.1 before F0.1, which it needs"


def test_harmless_swap_is_accepted() -> None:
    """Less warm-up is slower, not wrong."""
    schedule = build_schedule("1f1b", 2, 1, 3)
    assert check_schedule(with_rank(schedule, 0, [schedule.ranks[0][i] for i in (0, 2, 1, 3, 4, 5)])) == []


def test_circle_over_two_ranks_is_named() -> None:
    """Both sides of a circle are told, with the action each is at and the one it waits for."""
    assert check_schedule(PipelineSchedule("circle", 2, 2, parse(*CIRCLE))) == [
        "deadlock: rank 0 at B0.0 waits for B1.0 of rank 1; rank 1 at F1.1 waits for F0.1 of rank 0"
    ]


def test_ranks_that_only_wait_for_the_circle_are_not_blamed() -> None:
    """A deadlock of ranks 1 and 2 is told without rank 0, which merely waits for rank 1."""
    bad = PipelineSchedule("planted", 3, 2, parse("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1", "F2.0 F2.1 B2.0 B2.1"))
    (problem,) = check_schedule(bad)
    assert "rank 1 at B1.0 waits for B2.0 of rank 2" in problem
    assert "rank 0" not in problem


@given(st.sampled_from(SMALL), st.randoms())
def test_dropped_action_is_named(schedule: PipelineSchedule, rng: random.Random) -> None:
    """Whichever action is left out, the verdict names it and its rank."""
    rank = rng.randrange(schedule.pp)
    actions = list(schedule.ranks[rank])
    dropped = actions.pop(rng.randrange(len(actions)))
    assert check_schedule(with_rank(schedule, rank, actions)) == [f"rank {rank} never does {dropped}"]


@given(st.sampled_from(SMALL), st.randoms())
def test_repeated_action_is_named(schedule: PipelineSchedule, rng: random.Random) -> None:
    """An action that stands twice is named."""
    rank = rng.randrange(schedule.pp)
    twice = rng.choice(schedule.ranks[rank])
    assert check_schedule(with_rank(schedule, rank, [*schedule.ranks[rank], twice])) == [f"{twice} is done 2 times"]


def test_action_on_the_wrong_rank_is_named() -> None:
    """An action must stand on the rank that owns its stage."""
    schedule = PipelineSchedule("planted", 2, 1, parse("F0.0 F1.0 B1.0 B0.0", ""))
    assert check_schedule(schedule) == [
        "rank 0 does F1.0, but stage 1 is on rank 1",
        "rank 0 does B1.0, but stage 1 is on rank 1",
    ]


def test_unknown_stage_and_micro_batch_are_named() -> None:
    """Stages and micro-batches that the schedule does not have are refused."""
    schedule = PipelineSchedule("planted", 1, 1, parse("F0.0 B0.0 F0.1 B0.-1 F7.0"))
    assert len(check_schedule(schedule)) == 3


def test_backward_both_whole_and_halved_is_refused() -> None:
    """A micro-batch may not be counted twice by running B beside I and W."""
    schedule = PipelineSchedule("planted", 1, 1, parse("F0.0 B0.0 I0.0 W0.0"))
    assert check_schedule(schedule) == ["the backward of stage 0, micro-batch 0 is done both whole and in halves"]


def test_half_a_backward_is_not_enough() -> None:
    """An input gradient without its weight gradient is incomplete."""
    assert check_schedule(PipelineSchedule("planted", 1, 1, parse("F0.0 I0.0"))) == ["rank 0 never does W0.0"]


def test_whole_and_split_backwards_may_mix() -> None:
    """One micro-batch may run B and another I and W: the previous stage waits for either."""
    schedule = PipelineSchedule("mixed", 2, 2, parse("F0.0 F0.1 I0.0 B0.1 W0.0", "F1.0 B1.0 F1.1 I1.1 W1.1"))
    assert check_schedule(schedule) == []


def test_weight_before_input_gradient_is_refused() -> None:
    """W needs what I leaves."""
    assert check_schedule(PipelineSchedule("planted", 1, 1, parse("F0.0 W0.0 I0.0"))) == [
        "deadlock: rank 0 is to do W0.0 before I0.0, which it needs"
    ]


def test_sends_against_receives_out_of_order() -> None:
    """A receiver that takes micro-batch 1 first gets micro-batch 0's tensor: told although nothing deadlocks."""
    schedule = PipelineSchedule("misordered", 2, 2, parse(*MISORDERED))
    assert dependency_order(schedule)[1] == []
    assert check_schedule(schedule) == [
        "activations from rank 0 to rank 1: message 1 is stage 0, micro-batch 0 where it is sent "
        "and stage 0, micro-batch 1 where it is received"
    ]


def test_channels_of_a_line_and_of_a_ring() -> None:
    """Without virtual stages activations go down and gradients up; interleaving closes the ring; one rank has none."""
    down, up = Channel("activation", 0, 1), Channel("gradient", 1, 0)
    assert channels(build_schedule("1f1b", 2, 1, 2)) == (down, up)
    ring = channels(build_schedule("interleaved", 2, 2, 2))
    assert ring == (down, Channel("activation", 1, 0), Channel("gradient", 0, 1), up)
    assert len(channels(build_schedule("interleaved", 4, 3, 4))) == 8
    assert len(channels(build_schedule("zero-bubble", 4, 1, 4))) == 6
    assert channels(build_schedule("interleaved", 1, 3, 3)) == ()


@given(st.sampled_from(SMALL))
def test_channels_are_what_actions_use(schedule: PipelineSchedule) -> None:
    """The channels are exactly those over which some action sends, and some action receives."""
    actions = [action for rank in schedule.ranks for action in rank]
    sent = [message for action in actions if (message := sends(schedule, action))]
    received = [message for action in actions if (message := receives(schedule, action))]
    assert sorted(sent) == sorted(received)
    assert {message.channel for message in sent} == set(channels(schedule))


def test_peak_weighs_stages_and_what_is_put_off() -> None:
    """Uneven stages and the part that waits for the weight gradient count with their own bytes, at one moment."""
    schedule = PipelineSchedule("planted", 1, 2, parse("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1"))
    # Before I0.1 ends: micro-batch 1 in full (10) and what is left of micro-batch 0 (4).
    assert peak_held(schedule, activations=lambda stage: 10, put_off=lambda stage: 4) == (14,)
    assert (in_flight(schedule)[0].until_input_gradient, in_flight(schedule)[0].until_weight_gradient) == (1, 2)
    schedule = build_schedule("interleaved", 1, 2, 2)
    assert peak_held(schedule, activations=lambda stage: (5, 7)[stage], put_off=lambda stage: 0) == (12,)

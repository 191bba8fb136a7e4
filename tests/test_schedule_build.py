"""The four orders, held to the formulas of the papers they come from."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.errors import InputError
from triweave.layout import Schedule
from triweave.schedule import Action, Kind, build_schedule, check_schedule, in_flight, simulate
from triweave.schedule.build import interleaved, one_forward_one_backward

NAMES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@st.composite
def numbers(draw: st.DrawFn, name: Schedule) -> tuple[Schedule, int, int, int]:
    """A legal (name, pp, vpp, micro-batches)."""
    pp = draw(st.integers(1, 8))
    if name == "interleaved":
        return name, pp, draw(st.integers(1, 4)), pp * draw(st.integers(1, 4))
    return name, pp, 1, draw(st.integers(pp, 3 * pp + 2))


def bubble(name: Schedule, pp: int, vpp: int, m: int, seconds: dict[str, float]) -> float:
    """Idle time over computing time, the ratio of the papers."""
    return simulate(build_schedule(name, pp, vpp, m), lambda action: seconds[action.kind.value]).bubble_of_compute


@given(st.sampled_from(NAMES).flatmap(numbers))
def test_every_order_is_valid(numbers: tuple[Schedule, int, int, int]) -> None:
    """Whatever the legal numbers, the checker finds nothing wrong."""
    assert check_schedule(build_schedule(*numbers)) == []


@given(numbers("gpipe"), st.floats(0.1, 10), st.floats(0.1, 10))
def test_gpipe_bubble(numbers: tuple[Schedule, int, int, int], forward: float, backward: float) -> None:
    """GPipe idles (p - 1) / m of the computing time, whatever a forward and a backward take."""
    _, pp, _, m = numbers
    assert bubble(*numbers, {"F": forward, "B": backward}) == pytest.approx((pp - 1) / m)


@given(numbers("1f1b"), st.floats(0.1, 10), st.floats(0.1, 10))
def test_1f1b_bubble(numbers: tuple[Schedule, int, int, int], forward: float, backward: float) -> None:
    """1F1B idles exactly as long as GPipe."""
    _, pp, _, m = numbers
    assert bubble(*numbers, {"F": forward, "B": backward}) == pytest.approx((pp - 1) / m)


@given(numbers("interleaved"), st.floats(0.1, 10), st.floats(0.1, 10))
def test_interleaved_bubble(numbers: tuple[Schedule, int, int, int], forward: float, backward: float) -> None:
    """Interleaving divides the bubble by the virtual stages of a rank: (p - 1) / (v m)."""
    _, pp, vpp, m = numbers
    assert bubble(*numbers, {"F": forward, "B": backward}) == pytest.approx((pp - 1) / (vpp * m))


@given(numbers("zero-bubble"), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10))
def test_zero_bubble_bubble(
    numbers: tuple[Schedule, int, int, int], forward: float, input_gradient: float, weight_gradient: float
) -> None:
    """ZB-H1 idles (p - 1)(T_F + T_I - T_W) while T_W is the shortest, and never less than its fill and its drain."""
    _, pp, _, m = numbers
    seconds = {"F": forward, "I": input_gradient, "W": weight_gradient}
    idle_s = bubble(*numbers, seconds) * m * sum(seconds.values())
    expected_s = (pp - 1) * max(forward + input_gradient - weight_gradient, forward, input_gradient)
    assert idle_s == pytest.approx(expected_s, rel=1e-6, abs=1e-6)


def test_zero_bubble_is_a_third_of_1f1b() -> None:
    """With equal times, the bubble of ZB-H1 is T where 1F1B's is 3 T: the paper's headline."""
    seconds = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
    assert bubble("zero-bubble", 4, 1, 12, seconds) == pytest.approx(bubble("1f1b", 4, 1, 12, seconds) / 3)


@given(numbers("1f1b"))
def test_1f1b_in_flight(numbers: tuple[Schedule, int, int, int]) -> None:
    """Rank i of 1F1B holds min(m, p - i) micro-batches, the last one only one."""
    _, pp, _, m = numbers
    held = [rank.until_weight_gradient for rank in in_flight(build_schedule(*numbers))]
    assert held == [min(m, pp - i) for i in range(pp)]


@given(numbers("gpipe"))
def test_gpipe_in_flight(numbers: tuple[Schedule, int, int, int]) -> None:
    """Every rank of GPipe holds every micro-batch."""
    _, pp, _, m = numbers
    assert [rank.until_input_gradient for rank in in_flight(build_schedule(*numbers))] == [m] * pp


@given(numbers("interleaved"))
def test_interleaved_in_flight(numbers: tuple[Schedule, int, int, int]) -> None:
    """Rank i holds min(m v, 2 (p - i - 1) + (v - 1) p + 1) chunks: Megatron's warm-up and the one it works on."""
    _, pp, vpp, m = numbers
    held = [rank.until_weight_gradient for rank in in_flight(build_schedule(*numbers))]
    assert held == [min(m * vpp, 2 * (pp - i - 1) + (vpp - 1) * pp + 1) for i in range(pp)]


def test_interleaved_first_rank_has_korthikantis_factor() -> None:
    """With enough micro-batches the first rank holds p (1 + (p - 1) / (p v)) of them (2205.05198, section 4)."""
    pp, vpp = 8, 4
    first = in_flight(build_schedule("interleaved", pp, vpp, 4 * pp))[0]
    assert first.until_weight_gradient / vpp == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)))


@given(numbers("zero-bubble"))
def test_zero_bubble_in_flight(numbers: tuple[Schedule, int, int, int]) -> None:
    """ZB-H1 holds 1F1B's activations until the input gradient, and p micro-batches until the weight gradient."""
    _, pp, _, m = numbers
    held = in_flight(build_schedule(*numbers))
    assert [rank.until_input_gradient for rank in held] == [min(m, pp - i) for i in range(pp)]
    assert [rank.until_weight_gradient for rank in held] == [min(m, pp)] * pp


@given(st.sampled_from(NAMES).flatmap(numbers))
def test_gradients_are_summed_in_one_order(numbers: tuple[Schedule, int, int, int]) -> None:
    """Every stage sums its weight gradients from the first micro-batch to the last, whatever the schedule."""
    schedule = build_schedule(*numbers)
    for actions in schedule.ranks:
        for kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            for stage in {action.stage for action in actions}:
                order = [action.micro_batch for action in actions if (action.kind, action.stage) == (kind, stage)]
                assert all(before < after for before, after in pairwise(order))


def test_fewer_micro_batches_than_ranks_still_order_well() -> None:
    """The order itself is right for any number of micro-batches; only `build_schedule` wants the pipeline filled."""
    assert [str(action) for action in one_forward_one_backward(0, 4, 2)] == ["F0.0", "F0.1", "B0.0", "B0.1"]


def test_interleaved_takes_micro_batches_in_groups() -> None:
    """A group of pp micro-batches passes each virtual stage of the rank before the next group enters."""
    forwards = [a for a in interleaved(rank=1, pp=2, vpp=2, num_micro_batches=4) if a.kind is Kind.FORWARD]
    pairs = [(1, 0), (1, 1), (3, 0), (3, 1), (1, 2), (1, 3), (3, 2), (3, 3)]
    assert forwards == [Action(Kind.FORWARD, stage, micro_batch) for stage, micro_batch in pairs]


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "m", "message"),
    [
        ("1f1b", 4, 1, 3, "micro-batches of a step = 3: must be at least the 4 pipeline ranks"),
        ("gpipe", 4, 2, 8, "layout.vpp = 2: only the interleaved schedule has 2 virtual stages a rank"),
        ("interleaved", 4, 2, 9, "must be a multiple of 4; nearest: 8"),
        ("interleaved", 4, 2, 11, "must be a multiple of 4; nearest: 12"),
        ("interleavd", 4, 2, 8, "nearest: interleaved"),
        ("1f1b", 0, 1, 8, "layout.pp = 0: must be at least 1"),
    ],
)
def test_illegal_numbers_are_refused(name: Schedule, pp: int, vpp: int, m: int, message: str) -> None:
    """A wrong number is named with its rule and the nearest legal value."""
    with pytest.raises(InputError) as caught:
        build_schedule(name, pp, vpp, m)
    assert message in str(caught.value)


def test_all_wrong_numbers_are_reported_together() -> None:
    """Two mistakes, two problems."""
    with pytest.raises(InputError) as caught:
        build_schedule("1f1b", 4, 2, 3)
    assert [problem.key for problem in caught.value.problems] == ["layout.vpp", "micro-batches of a step"]

"""The planner's fast pipeline length, held to the simulator that the trainer's schedules are proved with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triweave.errors import InputError
from triweave.layout import Schedule
from triweave.planner.time_pipeline import StageCost, least_pipeline_s, pipeline_s
from triweave.schedule import build_schedule, simulate

SECONDS = st.floats(0.1, 3.0)


def simulated(
    name: Schedule, pp: int, vpp: int, micro_batches: int, costs: list[StageCost], transfer_s: float
) -> float:
    schedule = build_schedule(name, pp, vpp, micro_batches)
    return simulate(schedule, lambda action: costs[action.stage].of(action.kind), transfer_s).total_s


@st.composite
def stages(draw: st.DrawFn, count: int) -> list[StageCost]:
    """Equal stages, nearly equal ones (where a second circle may overtake late), or any."""
    kind = draw(st.sampled_from(["equal", "near", "any"]))
    if kind == "equal":
        return [StageCost(draw(SECONDS), draw(SECONDS), draw(SECONDS))] * count
    if kind == "near":
        return [StageCost(*(1 + draw(st.sampled_from([0.0, 1e-4, 1e-2])) for _ in range(3))) for _ in range(count)]
    return [StageCost(draw(SECONDS), draw(SECONDS), draw(SECONDS)) for _ in range(count)]


@settings(max_examples=150)
@given(st.data(), st.sampled_from(["gpipe", "1f1b", "zero-bubble"]), st.integers(1, 6), st.integers(0, 60))
def test_equals_the_simulator(data: st.DataObject, name: Schedule, pp: int, more: int) -> None:
    """Any stages, any messages up to half an action: the same length as the simulator's, long steps included."""
    costs = data.draw(stages(pp))
    transfer = data.draw(st.sampled_from([0.0, 0.01, 0.05]))
    expected = simulated(name, pp, 1, pp + more, costs, transfer)
    assert pipeline_s(name, pp, 1, pp + more, costs, transfer) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=60)
@given(st.data(), st.integers(2, 5), st.integers(2, 3), st.integers(1, 9))
def test_interleaved_equals_the_simulator(data: st.DataObject, pp: int, vpp: int, groups: int) -> None:
    """Equal virtual stages, the ends longer, as models have them: the simulator's length to a part in a million."""
    middle, head = data.draw(SECONDS), data.draw(st.floats(0.0, 0.5))
    costs = [StageCost(middle, middle, middle)] * (pp * vpp)
    costs[-1] = StageCost(middle * (1 + head), middle * (1 + head), middle * (1 + head))
    transfer = data.draw(st.sampled_from([0.0, 0.01]))
    expected = simulated("interleaved", pp, vpp, pp * groups, costs, transfer)
    assert pipeline_s("interleaved", pp, vpp, pp * groups, costs, transfer) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=100)
@given(
    st.data(), st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"]), st.integers(1, 5), st.integers(1, 6)
)
def test_no_order_undercuts_the_bound(data: st.DataObject, name: Schedule, pp: int, groups: int) -> None:
    """Any stages, any messages: the simulated step is at least the bound by which the search visits layouts."""
    if name in ("zero-bubble", "interleaved"):
        pp += 1
    vpp = data.draw(st.integers(2, 3)) if name == "interleaved" else 1
    costs = data.draw(stages(pp * vpp))
    transfer = data.draw(st.sampled_from([0.0, 0.01, 0.5]))
    least = least_pipeline_s(name, pp, pp * groups, costs, transfer)
    assert least <= simulated(name, pp, vpp, pp * groups, costs, transfer) * (1 + 1e-9)


@settings(max_examples=15)
@given(st.data(), st.integers(2, 4), st.integers(2, 3))
def test_thousands_of_micro_batches(data: st.DataObject, pp: int, vpp: int) -> None:
    """Interleaved over any stages, a step too long to lay out: within four thousandths of the simulator."""
    costs = data.draw(stages(pp * vpp))
    expected = simulated("interleaved", pp, vpp, 300 * pp, costs, 0.01)
    assert pipeline_s("interleaved", pp, vpp, 300 * pp, costs, 0.01) == pytest.approx(expected, rel=4e-3)


def test_the_bound_is_tight_where_stages_are_equal() -> None:
    """1F1B and the interleaved order of equal stages without messages take exactly that long."""
    for name, vpp in (("1f1b", 1), ("interleaved", 3)):
        costs = [StageCost(1.0, 1.0, 1.0)] * (4 * vpp)
        assert least_pipeline_s(name, 4, 16, costs, 0.0) == pytest.approx(pipeline_s(name, 4, vpp, 16, costs, 0.0))


def test_1f1b_closed_form() -> None:
    """Equal stages without messages take (m + p - 1)(F + B) (Narayanan et al. 2104.04473)."""
    costs = [StageCost(1.0, 1.0, 1.0)] * 8
    assert pipeline_s("1f1b", 8, 1, 4096, costs, 0.0) == pytest.approx((4096 + 7) * 3.0)


def test_one_rank_has_no_bubble() -> None:
    """A pipeline of one rank takes its own work, with several virtual stages as well."""
    costs = [StageCost(1.0, 2.0, 3.0), StageCost(0.5, 0.5, 0.5)]
    assert pipeline_s("interleaved", 1, 2, 10, costs, 1.0) == pytest.approx(75.0)


def test_a_planted_slow_stage_sets_the_pace() -> None:
    """Making one stage of eight a tenth slower lengthens a long step by a tenth, not by an eightieth."""
    even = [StageCost(1.0, 1.0, 1.0)] * 8
    uneven = [*even[:3], StageCost(1.1, 1.1, 1.1), *even[4:]]
    ratio = pipeline_s("1f1b", 8, 1, 1024, uneven, 0.0) / pipeline_s("1f1b", 8, 1, 1024, even, 0.0)
    assert ratio == pytest.approx(1.1, abs=0.002)


def test_messages_slow_1f1b_down() -> None:
    """With equal stages a micro-batch waits for its messages: the step grows by more than one way through."""
    costs = [StageCost(1.0, 1.0, 1.0)] * 4
    quiet, slow = (pipeline_s("1f1b", 4, 1, 64, costs, seconds) for seconds in (0.0, 0.1))
    assert slow > quiet + 6 * 0.1


def test_numbers_that_fit_no_schedule_are_refused() -> None:
    """Interleaving five micro-batches over two ranks is refused with the rule."""
    with pytest.raises(InputError, match="multiple of 2"):
        pipeline_s("interleaved", 2, 2, 5, [StageCost(1.0, 1.0, 1.0)] * 4, 0.0)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_long_steps_of_deep_pipelines(schedule: Schedule) -> None:
    """64 ranks and hundreds of micro-batches over uneven stages are continued from steps that fill the pipeline."""
    costs = [StageCost(1.0, 1.0 + 0.01 * (rank % 7), 1.0) for rank in range(64)]
    order = build_schedule(schedule, 64, 1, 600)
    expected = simulate(order, lambda action: costs[action.stage].of(action.kind), 0.05).total_s
    assert pipeline_s(schedule, 64, 1, 600, costs, 0.05) == pytest.approx(expected, rel=1e-3)

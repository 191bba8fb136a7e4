"""Where time went: the classes add up, lost work is lost once, and the recommended interval is the best one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.recovery.goodput import FILE, Event, Ledger, Timeline, best_interval_s, read_events

WHATS = ("start", "restore", "step", "save", "validation", "export", "end")


def ledger_of(events: list[Event]) -> Ledger:
    """A ledger that has taken all events."""
    ledger = Ledger()
    for event in events:
        ledger.take(event)
    return ledger


@given(st.lists(st.tuples(st.sampled_from(WHATS), st.floats(0, 50), st.floats(0, 100), st.integers(0, 9)), max_size=60))
def test_classes_add_up_to_the_whole_time(drawn: list[tuple[str, float, float, int]]) -> None:
    """Whatever happened in whatever order, nothing is counted twice and nothing is left out."""
    now, events = 1000.0, []
    for what, passed, seconds, step in drawn:
        now += passed
        events.append(Event(now, what, step, seconds))
    ledger = ledger_of(events)
    whole = events[-1].at - events[0].at if events else 0.0
    assert sum(ledger.seconds.values()) == pytest.approx(whole, abs=1e-6)
    assert 0 <= ledger.goodput <= 1 + 1e-9


def test_each_class_is_what_it_says() -> None:
    """Two starts: steps 3 and 4 are done twice, the second start restores step 2, and one step stands still."""
    events = [Event(0, "start", 0), Event(5, "step", 1, 1.0)]
    events += [Event(5 + n, "step", 1 + n, 1.0) for n in range(1, 4)]
    events.insert(3, Event(6, "save", 2, 0.0))
    events += [Event(20, "start", 0), Event(24, "restore", 2, 1.0)]
    events += [Event(25, "step", 3, 1.0), Event(35, "step", 4, 10.0), Event(37, "validation", 4, 2.0)]
    seconds = ledger_of(events).seconds
    assert seconds["start"] == 4 + 3
    assert seconds["restore"] == 1
    assert seconds["new steps"] == 4
    assert seconds["lost steps"] == 2
    assert seconds["stalls"] == 9
    assert seconds["stopped"] == 12
    assert seconds["validation"] == 2


def test_timeline_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """A line that was half written is dropped, and the next start's events follow the whole ones."""
    first = Timeline(tmp_path)
    first.add("start", 0, at=1.0)
    first.add("step", 1, 0.5)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"at": 3, "wh')
    Timeline(tmp_path).add("start", 0)
    assert [event.what for event in read_events(tmp_path / FILE)] == ["start", "step", "start"]


@pytest.mark.parametrize(("stall_s", "hours"), [(1.0, 24.0), (4.0, 288.0), (60.0, 24.0)])
def test_interval_loses_least(stall_s: float, hours: float) -> None:
    """No interval of a fine grid loses less than Young's by stalls and by half an interval a failure."""
    best = best_interval_s(stall_s, hours)

    def lost(interval_s: float) -> float:
        return stall_s / interval_s + interval_s / 2 / (hours * 3600)

    assert all(lost(best) <= lost(best * factor / 100) + 1e-12 for factor in range(20, 500))


def test_recommendation_counts_in_steps() -> None:
    """A stall of 1 s and a failure a day mean a save every 416 s: of steps of 2 s, every 208."""
    events = [Event(0, "start", 0)]
    events += [Event(2.0 * n, "step", n, 2.0) for n in range(1, 9)]
    events.append(Event(17, "save", 8, 1.0))
    told = ledger_of(events).recommend(24.0)
    assert told.startswith("checkpoint.every_steps 208 loses least (0.48 % of the time)")
    assert ledger_of(events[:5]).recommend(24.0) == ""

"""A run that starts again and again without a new step stops by itself, and says what each start ended with."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from triweave.errors import GivenUp
from triweave.recovery.goodput import Timeline
from triweave.recovery.starts import (
    DONE,
    FAILED,
    FILE,
    INTERRUPTED,
    LOST_A_PEER,
    MOST_CHARACTERS,
    STOPPED,
    begin,
    note_end,
    note_end_of,
    read_starts,
)

MOST = 3


def fail(folder: Path, times: int, run: str = "a", saved: int = 0) -> None:
    """So many starts that end with an error."""
    for number in range(times):
        begin(folder, run, saved, MOST)
        note_end(folder, FAILED, f"reason {number}", 1)


def step(folder: Path, number: int) -> None:
    """The run does a step."""
    Timeline(folder).add("step", number)


def test_storm_ends_with_what_each_start_ended_with(tmp_path: Path) -> None:
    """After so many starts in vain the next is refused: one message, a line a start, and what to do."""
    fail(tmp_path, 1)
    begin(tmp_path, "a", 0, MOST)  # killed: nobody says how it ended
    begin(tmp_path, "a", 0, MOST)
    note_end(tmp_path, LOST_A_PEER, "Connection closed by peer", 0)
    note_end(tmp_path, FAILED, "Traceback (most recent call last):\n  ...\nValueError: odd", 2)
    with pytest.raises(GivenUp) as refused:
        begin(tmp_path, "a", 0, MOST)
    first, *starts, last = str(refused.value).splitlines()
    assert "3 starts in a row came to no new step" in first
    assert "runtime.max_starts_without_step = 3" in first
    assert [line.partition(", from step 0: ")[2] for line in starts] == [
        "rank 1: reason 0",
        "ended without a word: killed, or its host is gone",
        "rank 2: ValueError: odd",
    ]
    assert str(tmp_path / FILE) in last
    with pytest.raises(GivenUp):  # a refusal is no start of its own: the next says the same
        begin(tmp_path, "a", 0, MOST)
    assert len(read_starts(tmp_path / FILE)) == MOST


@pytest.mark.parametrize("what", ["step", "save", "change", "good end", "no limit", "removed"])
def test_what_lets_a_run_go_on(tmp_path: Path, what: str) -> None:
    """A new step, a newer checkpoint, another run file, a good end, no limit, or a file that is taken away."""
    fail(tmp_path, MOST)
    run, saved, most = "a", 0, MOST
    if what == "step":
        step(tmp_path, 1)
    elif what == "save":
        saved = 10
    elif what == "change":
        run = "b"
    elif what == "good end":
        (tmp_path / FILE).unlink()
        fail(tmp_path, MOST - 1)
        begin(tmp_path, "a", 0, MOST)
        note_end(tmp_path, DONE, "", 0)
    elif what == "no limit":
        most = 0
    else:
        (tmp_path / FILE).unlink()
    begin(tmp_path, run, saved, most)


def test_same_steps_again_are_no_progress(tmp_path: Path) -> None:
    """A run that comes to step 7 and fails there each time has made a new step in its first start alone."""
    for _ in range(1 + MOST):
        begin(tmp_path, "a", 4, MOST)
        for number in range(5, 8):
            step(tmp_path, number)
        note_end(tmp_path, FAILED, "step 8: odd", 0)
    with pytest.raises(GivenUp):
        begin(tmp_path, "a", 4, MOST)


def test_progress_below_a_former_end_counts(tmp_path: Path) -> None:
    """Who went back to an earlier checkpoint does old steps again; there newer checkpoints are the progress."""
    begin(tmp_path, "a", 500, MOST)
    step(tmp_path, 520)
    for saved in (100, 200, 300, 400, 500):  # each of these starts is killed after its save
        begin(tmp_path, "a", saved, MOST)
        step(tmp_path, saved + 50)


def test_ctrl_c_does_not_count_and_a_stop_does(tmp_path: Path) -> None:
    """A person at a terminal sees what happens; a scheduler that stops every start before its first step does not."""
    for how in (INTERRUPTED, STOPPED) * MOST:
        begin(tmp_path, "a", 0, MOST)
        note_end(tmp_path, how, how)
    with pytest.raises(GivenUp) as refused:
        begin(tmp_path, "a", 0, MOST)
    assert str(refused.value).count(": stopped") == MOST
    assert INTERRUPTED not in str(refused.value)


def test_change_in_between_begins_anew(tmp_path: Path) -> None:
    """Starts of another run file before and after do not add up."""
    fail(tmp_path, MOST - 1, "a")
    fail(tmp_path, 1, "b")
    fail(tmp_path, MOST - 1, "a")
    begin(tmp_path, "a", 0, MOST)


def test_word_of_the_starting_process_comes_first(tmp_path: Path) -> None:
    """It has heard all ranks; but it says nothing of a start that was not that of its ranks."""
    begin(tmp_path, "a", 0, MOST)
    note_end(tmp_path, FAILED, "rank 0: what it met", 0)
    note_end_of([os.getpid() + 1], tmp_path, FAILED, "of another job")
    note_end_of([os.getpid()], tmp_path, FAILED, "rank 1 was ended by SIGKILL")
    (start,) = read_starts(tmp_path / FILE)
    assert (start.host, start.pid) == (socket.gethostname(), os.getpid())
    assert [one.said for one in start.ends] == ["rank 0: what it met", "rank 1 was ended by SIGKILL"]
    assert start.end is not None
    assert start.end.said == "rank 1 was ended by SIGKILL"


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    """A line that was cut off in being written costs itself and no other; long messages keep beginning and end."""
    fail(tmp_path, 1)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"what": "end", "how": "fai')
    begin(tmp_path, "a", 0, MOST)
    note_end(tmp_path, FAILED, "begin" + "x" * 10**6 + "end")
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes() + b'\xff\n[1]\n{"what": "start"}\n3\n')
    starts = read_starts(tmp_path / FILE)
    assert len(starts) == 2
    said = starts[1].ends[0].said
    assert said.startswith("beginx")
    assert said.endswith("xend")
    assert len(said) < MOST_CHARACTERS + 10
    json.dumps(said)


def test_unwritable_folder_does_not_hide_the_error(tmp_path: Path) -> None:
    """What ended a run is told even where nothing can be written down."""
    note_end(tmp_path / "nowhere", FAILED, "odd")

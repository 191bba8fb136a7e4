"""The two drawings: golden pictures, and the geometry read back from the strings."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.layout import Schedule
from triweave.schedule import Action, Kind, Timeline, build_schedule, draw_svg, draw_timeline, simulate

MS = {Kind.FORWARD: 1e-3, Kind.BACKWARD: 2e-3, Kind.BACKWARD_INPUT: 1e-3, Kind.BACKWARD_WEIGHT: 1e-3}


def timeline(name: Schedule, pp: int, vpp: int, m: int) -> Timeline:
    """A forward of 1 ms, a backward of 2 ms, either of its halves 1 ms."""
    return simulate(build_schedule(name, pp, vpp, m), lambda action: MS[action.kind])


GOLDEN_1F1B = """\
1f1b, pp 4, micro-batches 8: 33 ms, 27.3 % idle
stage 0 F0F1F2F3............B0  F4B1  F5B2  F6B3  F7B4  ..B5  ..B6  ..B7
stage 1 ..F0F1F2........B0  F3B1  F4B2  F5B3  F6B4  F7B5  ..B6  ..B7  ....
stage 2 ....F0F1....B0  F2B1  F3B2  F4B3  F5B4  F6B5  F7B6  ..B7  ........
stage 3 ......F0B0  F1B1  F2B2  F3B3  F4B4  F5B5  F6B6  F7B7  ............
F forward; B backward; . idle; 2 characters are 1 ms"""

GOLDEN_1F1B_CUT = """\
1f1b, pp 4, micro-batches 32: 105 ms, 8.6 % idle
stage 0 F0F1F2F3............B0  F4 ~ B8  ..B9  ..B0  ..B1
stage 1 ..F0F1F2........B0  F3B1   ~ F1B9  ..B0  ..B1  ....
stage 2 ....F0F1....B0  F2B1  F3B2 ~   F1B0  ..B1  ........
stage 3 ......F0B0  F1B1  F2B2  F3 ~ B0  F1B1  ............
F forward; B backward; the digit is the last of the micro-batch's number; .
idle; 2 characters are 1 ms; ~ leaves out 27 repetitions of 3 ms"""

GOLDEN_GPIPE_CUT = """\
gpipe, pp 4, micro-batches 32: 105 ms, 8.6 % idle
stage 0 F0F1F2F3 ~ ..................B0   ~ B9  B0  B1
stage 1 ..F0F1F2 ~ F1............B0  B1   ~ B0  B1  ....
stage 2 ....F0F1 ~ F0F1......B0  B1  B2   ~ B1  ........
stage 3 ......F0 ~ F9F0F1B0  B1  B2  B3   ~ ............
F forward; B backward; the digit is the last of the micro-batch's number; .
idle; 2 characters are 1 ms; ~ leaves out 28 repetitions of 1 ms; ~ leaves out
28 repetitions of 2 ms"""

GOLDEN_ZERO_BUBBLE = """\
zero-bubble, pp 4, micro-batches 8: 27 ms, 11.1 % idle
stage 0 F0F1F2F3......I0W0F4I1W1F5I2W2F6I3W3F7I4W4I5W5I6W6I7W7
stage 1 ..F0F1F2....I0F3I1W0F4I2W1F5I3W2F6I4W3F7I5W4I6W5I7W6W7
stage 2 ....F0F1..I0F2I1F3I2W0F4I3W1F5I4W2F6I5W3F7I6W4I7W5W6W7
stage 3 ......F0I0F1I1F2I2F3I3W0F4I4W1F5I5W2F6I6W3F7I7W4W5W6W7
F forward; I input gradient; W weight gradient; . idle; 2 characters are 1 ms"""

GOLDEN_INTERLEAVED = """\
interleaved, pp 2 x vpp 2, micro-batches 2: 15 ms, 20.0 % idle
rank 0 Fa0Fa1Fb0Fb1......Bb0   ...Bb1   Ba0   Ba1
rank 1 ...Fa0Fa1Fb0Bb0   Fb1Bb1   Ba0   Ba1   ......
F forward; B backward; . idle; 3 characters are 1 ms"""


@pytest.mark.parametrize(
    ("numbers", "golden"),
    [
        (("1f1b", 4, 1, 8), GOLDEN_1F1B),
        (("1f1b", 4, 1, 32), GOLDEN_1F1B_CUT),
        (("gpipe", 4, 1, 32), GOLDEN_GPIPE_CUT),
        (("zero-bubble", 4, 1, 8), GOLDEN_ZERO_BUBBLE),
        (("interleaved", 2, 2, 2), GOLDEN_INTERLEAVED),
    ],
)
def test_golden_timelines(numbers: tuple[Schedule, int, int, int], golden: str) -> None:
    """The pictures of known schedules, character by character."""
    assert draw_timeline(timeline(*numbers)) == golden


@given(
    st.sampled_from([("gpipe", 4, 1, 40), ("1f1b", 6, 1, 50), ("interleaved", 3, 3, 12), ("zero-bubble", 8, 1, 30)]),
    st.randoms(),
    st.integers(40, 200),
)
def test_no_line_is_too_wide(numbers: tuple[Schedule, int, int, int], rng: random.Random, width: int) -> None:
    """Uneven actions and slow links: still a row a rank, and no line above the width asked for."""
    schedule = build_schedule(*numbers)
    uneven = simulate(schedule, lambda action: MS[action.kind] * rng.uniform(0.2, 3.0), rng.uniform(0.0, 1e-3))
    lines = draw_timeline(uneven, width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(re.match(r"(stage|rank) \d+ ", line) is not None for line in lines) == schedule.pp


@pytest.mark.parametrize(
    "numbers", [("gpipe", 4, 1, 9), ("1f1b", 6, 1, 9), ("interleaved", 3, 3, 9), ("zero-bubble", 8, 1, 9)]
)
def test_uncut_rows_hold_every_action_once(numbers: tuple[Schedule, int, int, int]) -> None:
    """With room for all, a row names its rank's actions in order, and dots are its idle units."""
    drawn = timeline(*numbers)
    rows = [line for line in draw_timeline(drawn, 10_000).splitlines() if re.match(r"(stage|rank) \d+ ", line)]
    size = 2 if drawn.schedule.num_stages == drawn.schedule.pp else 3
    for row, actions, busy_s in zip(rows, drawn.schedule.ranks, drawn.busy_s, strict=True):
        picture = row.split(maxsplit=2)[2].ljust(round(drawn.total_s * 1e3) * size)
        names = re.findall(r"([FBIW])[a-z]?(\d)", picture)
        assert names == [(action.kind.value, str(action.micro_batch)) for action in actions]
        assert picture.count(".") == round((drawn.total_s - busy_s) * 1e3) * size


def test_a_very_short_action_does_not_stretch_the_picture() -> None:
    """One action a thousand times shorter than the rest leaves the others a readable width."""

    def cost(action: Action) -> float:
        return 1e-6 if action == Action(Kind.FORWARD, 0, 0) else MS[action.kind]

    lines = draw_timeline(simulate(build_schedule("1f1b", 2, 1, 2), cost), 1000).splitlines()
    assert max(map(len, lines)) < 120


def test_free_actions_draw_nothing() -> None:
    """A timeline of no length is drawn without a division by zero."""
    nothing = simulate(build_schedule("1f1b", 1, 1, 2), lambda action: 0.0)
    assert draw_timeline(nothing).splitlines()[:2] == ["1f1b, pp 1, micro-batches 2: 0 us, 0.0 % idle", "stage 0"]
    assert "<svg" in draw_svg(nothing)


class Picture(HTMLParser):
    """Reads elements with their attributes and text, and refuses what is not well nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data


def bars(svg: str, css_class: str) -> list[tuple[float, float, float]]:
    """(row top, left, width) of every bar of a class, read from its paths."""
    found = []
    for tag, attributes in Picture(svg).elements:
        if tag == "path" and attributes.get("class") == css_class:
            for left, top, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", attributes["d"] or ""):
                found.append((float(top), float(left), float(width)))
    return found


@pytest.mark.parametrize(
    "numbers", [("gpipe", 2, 1, 5), ("1f1b", 4, 1, 8), ("interleaved", 4, 2, 8), ("zero-bubble", 4, 1, 20)]
)
def test_bars_are_where_the_times_are(numbers: tuple[Schedule, int, int, int]) -> None:
    """Read back from the paths, every action lies at its time to a hundredth of a pixel, and idle fills the rest."""
    drawn = timeline(*numbers)
    svg = draw_svg(drawn)
    scale = 840 / drawn.total_s
    for kind, name in [
        (Kind.FORWARD, "forward"),
        (Kind.BACKWARD, "backward"),
        (Kind.BACKWARD_INPUT, "input-gradient"),
        (Kind.BACKWARD_WEIGHT, "weight-gradient"),
    ]:
        expected = sorted(
            (30.0 + 20 * rank, 60 + span.start_s * scale, span.duration_s * scale)
            for rank, spans in enumerate(drawn.spans)
            for span in spans
            if span.action.kind is kind
        )
        for left, right in zip(sorted(bars(svg, name)), expected, strict=True):
            assert left == pytest.approx(right, abs=0.02)
    idle = sum(width for _, _, width in bars(svg, "idle"))
    assert idle / (840 * drawn.schedule.pp) == pytest.approx(drawn.bubble_of_total, abs=1e-3)


def test_svg_is_an_image_with_a_title_and_a_key() -> None:
    """Assistive tools get one image, the headline as its name and the letters in its description."""
    drawn = timeline("1f1b", 4, 1, 8)
    picture = Picture(draw_svg(drawn))
    assert picture.elements[0][0] == "svg"
    assert picture.elements[0][1]["role"] == "img"
    assert picture.text["title"] == "1f1b, pp 4, micro-batches 8: 33 ms, 27.3 % idle"
    assert "F forward, B backward" in picture.text["desc"]
    assert not any("id" in attributes or "href" in attributes for _, attributes in picture.elements)


def test_svg_has_one_path_a_row_and_colour() -> None:
    """Size follows the rows, not the actions: 64 ranks x 256 micro-batches stay under 2 MB and 600 elements."""
    svg = draw_svg(timeline("zero-bubble", 64, 1, 256))
    assert len(svg) < 2_000_000
    assert len(Picture(svg).elements) < 600


def test_letters_are_drawn_only_where_they_fit() -> None:
    """Wide bars carry kind and number, narrow ones nothing: the legend and the colours remain."""
    assert ">F0F1B0F2B1F3B2B3<" in draw_svg(timeline("1f1b", 2, 1, 4))
    assert ">FFBFB" in draw_svg(timeline("1f1b", 2, 1, 30))
    assert not re.search(">[FB]{2}", draw_svg(timeline("1f1b", 2, 1, 400)))


def test_every_second_virtual_stage_is_lighter() -> None:
    """The same kind has two fills where a rank holds several virtual stages, one where it holds one."""
    for vpp, fills in ((1, 1), (2, 2), (3, 2)):
        elements = Picture(draw_svg(timeline("interleaved", 2, vpp, 4))).elements
        assert len({item["fill"] for _, item in elements if item.get("class") == "forward"}) == fills


def test_two_pictures_share_an_axis() -> None:
    """With the longer length given, the shorter timeline ends where its time is, and idle is drawn only up to there."""
    drawn = timeline("1f1b", 2, 1, 4)
    svg = draw_svg(drawn, axis_s=2 * drawn.total_s)
    ends = [left + width for name in ("forward", "backward", "idle") for _, left, width in bars(svg, name)]
    assert max(ends) == pytest.approx(60 + 420, abs=0.02)


def test_a_name_cannot_break_out() -> None:
    """A schedule's name is text, whatever it holds."""
    drawn = timeline("1f1b", 2, 1, 2)
    odd = replace(drawn, schedule=replace(drawn.schedule, name="<script>"))
    assert "<script>" not in draw_svg(odd)


def test_golden_svg() -> None:
    """A small picture, byte by byte; look at the file before replacing it."""
    golden = Path(__file__).parent / "golden" / "schedule_1f1b.svg"
    assert draw_svg(timeline("1f1b", 2, 1, 2)) == golden.read_text(encoding="utf-8")

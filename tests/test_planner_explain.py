"""What the planner says about a layout is true: every sentence with a number is held to the prices it came from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from triweave.layout import Layout
from triweave.planner.answer import memory_bars, spell_layout, to_text
from triweave.planner.ask import given_layout, make_request
from triweave.planner.explain import why
from triweave.planner.picture import draw_answer, parts_of
from triweave.planner.request import Candidate, Request, price, time_of, timeline_of
from triweave.planner.search import Plan
from triweave.planner.space import layouts

GIB = 2**30


@pytest.fixture(scope="module")
def question() -> Request:
    return make_request("meta-llama/Llama-3-70B", "4x8xh100-80gb", 4096, 128)


@pytest.fixture(scope="module")
def fsdp(question: Request) -> Candidate:
    return price(question, given_layout(question, "dp=32,shard=full"))


@pytest.fixture(scope="module")
def grid(question: Request) -> Candidate:
    return price(question, given_layout(question, "tp=4,pp=4,vpp=5,schedule=interleaved,recompute=[norm,swiglu]"))


def test_every_change_that_is_told_to_fit_fits(question: Request, fsdp: Candidate) -> None:
    """Of a layout that runs out of memory: each change named, priced again, fits with that peak and that step."""
    lines = [line for line in why(question, fsdp) if line.startswith("fits with")]
    assert lines
    for line in lines:
        found = re.fullmatch(r"fits with (.*): ([\d.]+) GiB, step ([\d.]+) s \(\+(\d+) %\)", line)
        assert found, line
        changes = dict(re.findall(r"(recompute|offload) (\[.*?\])", found[1]))
        words = [f"{key}={value.replace(' ', '')}" for key, value in changes.items()]
        other = price(question, given_layout(question, ",".join(["dp=32,shard=full", *words])))
        assert other.fits
        assert f"{other.peak_bytes / GIB:.1f}" == found[2]
        assert f"{other.time.step_s:.2f}" == found[3]
        assert f"{100 * (other.time.step_s / fsdp.time.step_s - 1):.0f}" == found[4]
    assert any("offload" in line for line in lines)


def test_smaller_moments_are_told_where_they_make_it_fit() -> None:
    """All of 70B on eight H200 fits with moments in bfloat16, with the peak and the step that `plan` gives then."""
    asked = ("meta-llama/Llama-3-70B", "1x8xh200-141gb", 8192, 32)
    question, smaller = make_request(*asked), make_request(*asked, moments="bfloat16")
    words = "tp=8,recompute=[layer]"
    before, after = (price(one, given_layout(one, words)) for one in (question, smaller))
    assert not before.fits
    assert after.fits
    # Four bytes less of each parameter of the rank, and the allocator's share of them.
    saved = before.memory[0].peak_allocated_bytes - after.memory[0].peak_allocated_bytes
    assert saved == pytest.approx(4 * question.spec.num_parameters / 8, rel=1e-3)
    # Eight bytes less to be moved of each, at the rate of the card's memory.
    shorter = before.time.breakdown.optimizer - after.time.breakdown.optimizer
    assert 8 * question.spec.num_parameters / 8 / shorter == pytest.approx(4.2e12, rel=0.2)
    (line,) = [line for line in why(question, before) if line.startswith("fits with moments bfloat16")]
    assert f": {after.peak_bytes / GIB:.1f} GiB, step {after.time.step_s:.2f} s" in line
    assert "moments bfloat16" not in " ".join(why(smaller, price(smaller, given_layout(smaller, "tp=8"))))


def test_offload_waits_where_copies_take_longer_than_a_layer(question: Request) -> None:
    """Gate and up of 70B leave beside a layer's forward, all that a layer keeps does not; host memory is told.

    By hand: 4 x 28,672 bytes a token and layer at 55 GB/s are 2.1 us; the forward of 0.86 B parameters at two thirds of
    989 TFLOP/s, 2.6 us and attention.
    """
    found = {}
    for words in ("", ",recompute=[norm,swiglu]"):
        base = price(question, given_layout(question, f"dp=32,shard=full{words}"))
        for kinds in ("mlp", "attention,mlp"):
            one = price(question, given_layout(question, f"dp=32,shard=full{words},offload=[{kinds}]"))
            found[words, kinds] = one.time.step_s / base.time.step_s - 1, one
    assert found[",recompute=[norm,swiglu]", "mlp"][0] < 0.005
    assert 0.03 < found["", "mlp"][0] < found["", "attention,mlp"][0] < 0.2
    one = found[",recompute=[norm,swiglu]", "mlp"][1]
    by_hand = 80 * 4096 * 2 * 2 * 28672
    assert one.memory[0].host_bytes == by_hand
    assert any(f"pins up to {by_hand / GIB:.1f} GiB" in line and "a node of 8" in line for line in why(question, one))


def test_says_when_nothing_helps(question: Request) -> None:
    """Optimizer states of 70B on one rank of each: no single change makes it fit, and it is said."""
    lines = why(question, price(question, given_layout(question, "dp=32,shard=none")))
    assert any(line.startswith("no single change makes it fit") for line in lines)


def test_time_adds_up(question: Request, grid: Candidate) -> None:
    """The shares of time are those of the step: told ones sum to it, but for what is below two per cent."""
    (line,) = [line for line in why(question, grid) if line.startswith("time: ")]
    shares = [int(share) for share in re.findall(r"(\d+) %", line)]
    assert 100 - 2 * 6 <= sum(shares) <= 101
    assert shares == sorted(shares, reverse=True)
    assert grid.time.breakdown.total == pytest.approx(grid.time.step_s)


def test_what_recomputation_costs(question: Request, grid: Candidate) -> None:
    """The price and the gain of recomputing are those of the same layout without it."""
    (line,) = [line for line in why(question, grid) if line.startswith("recomputing")]
    without = price(question, replace(grid.layout, recompute=()))
    assert f"{100 * (1 - without.time.step_s / grid.time.step_s):.1f} %" in line
    assert f"{(without.peak_bytes - grid.peak_bytes) / GIB:.1f} GiB" in line


def test_more_nodes(question: Request, grid: Candidate) -> None:
    """The speed-up of twice the nodes is that of the doubled layout on the doubled cluster."""
    (line,) = [line for line in why(question, grid) if "twice the nodes" in line]
    wider = make_request("meta-llama/Llama-3-70B", "8x8xh100-80gb", 4096, 128)
    doubled = time_of(wider, replace(grid.layout, dp=2 * grid.layout.dp))
    assert f"{grid.time.step_s / doubled.step_s:.2f} times" in line


def test_the_timeline_is_the_step(question: Request) -> None:
    """What is drawn takes as long as what was priced, but for what follows the last backward."""
    several = [one for one in layouts(question) if one.pp > 1 and (one.tp, one.micro_batch) == (4, 1)][::9]
    assert {one.schedule for one in several} == {"1f1b", "zero-bubble", "interleaved"}
    for layout in several:
        if question.global_batch // layout.dp % layout.pp:
            continue
        time = time_of(question, layout)
        after = time.breakdown.optimizer + (0.0 if layout.shard == "full" else time.breakdown.data_parallel)
        assert timeline_of(question, layout).total_s == pytest.approx(time.step_s - after, rel=1e-6)


def test_bars_end_where_the_numbers_say(question: Request, grid: Candidate, fsdp: Candidate) -> None:
    """A bar is as long as its share of the card; the capacity mark stands after bars that fit, before those that do
    not."""
    width = 98
    for bar, stage in zip(memory_bars(question, grid, width), grid.memory, strict=True):
        filled = bar.count("█")
        assert filled == pytest.approx((width - 30) * stage.used_bytes / question.capacity_bytes, abs=1.01)
        assert bar.index("│") > bar.rindex("█")
        assert f"{stage.used_bytes / GIB:.1f}/" in bar
        assert len(bar) <= width
    (bar,) = memory_bars(question, fsdp, width)
    assert "│" not in bar


def test_the_picture_adds_up(question: Request, grid: Candidate, fsdp: Candidate) -> None:
    """Parts of a bar sum to what the card uses; the picture is one well-formed drawing that loads nothing."""
    for candidate in (grid, fsdp):
        for stage in candidate.memory:
            parts = parts_of(stage)
            assert sum(parts.values()) == stage.used_bytes
            assert parts["moments"] == stage.components["moments"]
            assert parts["weights"] == stage.components.get("weights", 0) + stage.components.get("master weights", 0)
        drawing = draw_answer(question, candidate, timeline_of(question, candidate.layout))
        root = ElementTree.fromstring(drawing)  # noqa: S314
        assert root.get("role") == "img"
        names = [element.tag.rpartition("}")[2] for element in root]
        assert names[:2] == ["title", "desc"]
        assert "href" not in drawing
        assert "script" not in drawing
        bars = [element for element in root if element.tag.endswith("rect") and len(element)]
        ends = {float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in bars}
        assert max(ends) <= 850.2


def test_a_name_with_markup_is_text(question: Request, grid: Candidate) -> None:
    """A model folder may be called anything."""
    odd = replace(question, model="a<b>&c")
    drawing = draw_answer(odd, grid, timeline_of(odd, grid.layout))
    assert "a<b>&c on 4x8xh100-80gb" in "".join(ElementTree.fromstring(drawing).itertext())  # noqa: S314


def test_layouts_are_spelt_for_people() -> None:
    """Everything that is not the default, layer maps in runs."""
    layout = Layout(tp=4, pp=2, vpp=2, dp=2, schedule="interleaved", recompute=("norm",), layers=(3, 2, 2, 1))
    assert spell_layout(layout) == (
        "tp4 pp2 vpp2 dp2, micro-batch 1, interleaved, shard optimizer, recompute norm, layers 3+2x2+1"
    )


def test_the_text_tells_all_answers(question: Request, grid: Candidate) -> None:
    """Each answer has its number, and the second says how much slower it is."""
    text = "\n".join(to_text(question, Plan((grid, grid), (), 1)))
    assert "1. tp4 pp4" in text
    assert "2. tp4 pp4" in text
    assert "0.0 % slower than the first" in text


def test_the_page_tells_what_is_predicted(question: Request) -> None:
    """The table of docs/planner.md is what the planner says, to two per cent."""
    page = (Path(__file__).parent.parent / "docs" / "planner.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(tp=.*|dp=.*)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for words, peak, step, mfu in rows:
        one = price(question, given_layout(question, words))
        now = (one.peak_bytes / GIB, one.time.step_s, 100 * one.time.mfu.causal)
        assert now == pytest.approx((float(peak), float(step), float(mfu)), rel=0.02)

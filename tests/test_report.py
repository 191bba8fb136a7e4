"""The page of a run: what it says, what it survives, that it stands alone."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_folders import gpu_run, write_lines

from triweave.cli import main
from triweave.layout import Layout
from triweave.report.bars import Bar, draw_bars
from triweave.report.curve import draw_curve
from triweave.report.grid import draw_grid
from triweave.report.page import page
from triweave.report.read import measured_pipeline, predicted_pipeline, read_run
from triweave.report.summary import summary

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Tree(HTMLParser):
    """Checks that every tag is closed where it was opened, and remembers what the page names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Tree:
    """The page, read as a browser would, and its pictures as XML."""
    tree = Tree()
    tree.feed(text)
    assert tree.open == []
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)  # noqa: S314 - made by the code under test
    return tree


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on GPUs with everything in its folder; only read."""
    return gpu_run(tmp_path_factory.mktemp("runs") / "llama70b", steps=120)


def test_the_page_stands_alone(run: Path) -> None:
    """It is whole, and names nothing that a browser would load, nor any script."""
    text = page(read_run(run))
    tree = parsed(text)
    assert [tag for tag, _ in tree.seen if tag in ("script", "link", "img", "iframe", "object", "embed")] == []
    assert [value for _, attrs in tree.seen for key, value in attrs.items() if key in ("src", "href")] == []
    assert "url(" not in text
    assert "@import" not in text
    policy = next(attrs for tag, attrs in tree.seen if "http-equiv" in attrs)
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_picture_can_be_read_aloud(run: Path) -> None:
    """Each has a role, a title and a sentence that says what to see."""
    text = page(read_run(run))
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 12  # step, two pipelines, memory, seven curves, grid
    for picture in pictures:
        root = ElementTree.fromstring(picture)  # noqa: S314 - made by the code under test
        assert root.get("role") == "img"
        assert root.findtext("{*}title")
        assert len(root.findtext("{*}desc") or "") > 10


def test_plan_against_measurement(run: Path) -> None:
    """The numbers are those of the files: medians after the warm-up, the fullest stage, what was said before."""
    record = read_run(run)
    said = summary(record)
    forecast = json.loads((run / "forecast.json").read_text())
    taken = sorted(step["step_s"] for step in record.steps[2:])
    assert said["step_s"]["predicted"] == forecast["step"]["step_s"]
    assert said["step_s"]["measured"] == pytest.approx((taken[58] + taken[59]) / 2)
    assert said["peak_allocated_gib"]["predicted"] == max(s["allocated_bytes"] for s in forecast["stages"]) / 2**30
    for stage in said["stages"]:
        assert sum(stage["measured"].values()) == pytest.approx(stage["measured_gib"])
        assert sum(stage["predicted"].values()) == pytest.approx(stage["predicted_gib"])
        assert stage["measured_gib"] == pytest.approx(1.003 * stage["predicted_gib"], rel=1e-6)


def test_the_pipelines_are_those_of_the_files(run: Path) -> None:
    """Predicted is the schedule with the forecast's actions in it; measured begins with its first action."""
    record = read_run(run)
    told, seen = predicted_pipeline(record), measured_pipeline(record)
    assert told is not None
    assert seen is not None
    assert told.schedule == seen.schedule
    assert min(rank[0].start_s for rank in seen.spans) == 0.0
    assert told.total_s < record.forecast["step"]["step_s"]  # type: ignore[index]


def test_a_line_that_was_cut_off(run: Path, tmp_path: Path) -> None:
    """It is named with its place and left out; the other steps are all there."""
    whole = (run / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([*whole[:5], "garbage", '{"loss": 1}', whole[6], whole[7][:40]]))
    record = read_run(tmp_path)
    assert [step["step"] for step in record.steps] == [1, 2, 3, 4, 5, 7]
    assert [problem.partition(": ")[0] for problem in record.problems] == [f"metrics.jsonl:{n}" for n in (6, 7, 9)]
    assert "metrics.jsonl:9: cut off or damaged, left out" in page(record)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_just_begun(tmp_path: Path, steps: int) -> None:
    """Before the first step the page tells the plan; with a step or two it is whole already."""
    folder = gpu_run(tmp_path / "run", steps=steps)
    for name in ("memory.json", "pipeline.json", "validation.jsonl"):
        (folder / name).unlink()
    text = page(read_run(folder))
    parsed(text)
    assert ("No step is done yet" in text) is (steps == 0)
    assert "Memory by stage" in text


def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    """Without a forecast and with values that are null, what there is is shown."""
    lines = [{"step": n, "loss": 2.0 / n, "step_s": 0.1, "mfu_causal": None, "tokens": 64 * n} for n in (1, 2, 3)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    text = page(read_run(tmp_path))
    parsed(text)
    assert "3 steps are done, and a step takes 100 ms." in text.replace("\u00a0", " ")
    assert "no forecast.json" in text


def test_a_step_that_was_done_twice(tmp_path: Path) -> None:
    """After a restart the last line of a step counts, and steps are in order."""
    write_lines(
        tmp_path / "metrics.jsonl", [{"step": n, "loss": x} for n, x in ((1, 3.0), (2, 2.0), (2, 1.0), (3, 0.5))]
    )
    assert read_run(tmp_path).series("loss") == [(1, 3.0), (2, 1.0), (3, 0.5)]


def test_names_are_not_taken_for_markup(tmp_path: Path) -> None:
    """What files hold is text, whatever it looks like."""
    folder = gpu_run(tmp_path / "<b>run", steps=3)
    (folder / "run.yaml").write_text("model: {path: '</pre><script>alert(1)</script>'}")
    assert "<script" not in page(read_run(folder))


def code_of(*words: str) -> int:
    """Exit code of `triweave report WORDS`."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_verb(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It writes the page where it is told, or prints the numbers and nothing else."""
    out = tmp_path / "page.html"
    assert code_of(str(run), "--out", str(out)) == 0
    assert out.read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert code_of(str(run), "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 120
    assert not (run / "report.html").exists()


def test_wrong_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No folder, a file, a folder without a run and one with empty metrics end with 2 and say which."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").touch()
    told = {"nowhere": "does not exist", "file": "is a file", "empty": "has no metrics.jsonl", "begun": "is empty"}
    for name, rule in told.items():
        assert code_of(str(tmp_path / name)) == 2
        assert rule in capsys.readouterr().err
    folder = gpu_run(tmp_path / "run", steps=1)
    assert code_of(str(folder), "--out", str(tmp_path / "not" / "there.html")) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["forecast.json", "memory.json", "pipeline.json"])
@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99}'])
def test_a_damaged_file(tmp_path: Path, name: str, text: str) -> None:
    """A file that is cut off, or of another form, is named and left out."""
    folder = gpu_run(tmp_path / "run", steps=3)
    (folder / name).write_text(text)
    record = read_run(folder)
    assert [problem.partition(":")[0] for problem in record.problems] == [name]
    parsed(page(record))


def test_many_points_stay_light() -> None:
    """100,000 steps are drawn by least and most of each column: the picture is small, and its extremes are there."""
    points = [(step, 1.0 + (step == 54_321) * 8.0) for step in range(100_000)]
    picture = draw_curve(points, title="loss", reading="one spike", colour="#000", letter="L")
    assert len(picture) < 40_000
    band = re.search(r'stroke-opacity=".35" d="([^"]+)"', picture)
    assert band is not None
    tops = [float(top) for top in re.findall(r"M\d+ ([\d.]+)V", band[1])]
    assert min(tops) < min(sorted(tops)[1:]) - 100


def test_a_bar_is_as_long_as_its_parts() -> None:
    """On one scale, so that the eye may compare: twice as much is twice as long."""
    bars = [Bar("a", {"weights": 1.0, "gradients": 3.0}), Bar("b", {"weights": 2.0})]
    picture = draw_bars(bars, title="t", reading="r", unit="GiB", limit=8.0, limit_name="card")
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" y="\d+" width="([\d.]+)" height="19"', picture)]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.2)
    assert widths[2] == pytest.approx(2 * widths[0], abs=0.2)


def test_the_grid_has_a_cell_a_rank() -> None:
    """Every rank once, in the row of its node, also where nodes are many."""
    for layout, per_node in ((Layout(tp=8, pp=4), 8), (Layout(tp=8, pp=16, dp=8), 8), (Layout(dp=2), 2)):
        picture = draw_grid(layout, per_node)
        root = ElementTree.fromstring(picture)  # noqa: S314 - made by the code under test
        titles = [cell.findtext("{*}title") or "" for cell in root.iter("{http://www.w3.org/2000/svg}rect")]
        assert [int(title.split()[1].rstrip(":")) for title in titles] == list(range(layout.world_size))

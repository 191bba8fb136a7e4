"""bench/campaign.py: what is drawn, that predictions are made once and sealed, and that a failure is a row."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command_line import environment

BENCH = Path(__file__).parent.parent / "bench"
MODULES = ("campaign", "campaign_cases", "campaign_measure", "campaign_table", "measuring")


@pytest.fixture(scope="module")
def campaign() -> Iterator[ModuleType]:
    """`bench/campaign.py` as a module, with its neighbours importable as long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("campaign")
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture
def cases(campaign: ModuleType) -> ModuleType:
    """`bench/campaign_cases.py`."""
    return sys.modules["campaign_cases"]


@pytest.fixture
def tables(campaign: ModuleType) -> ModuleType:
    """`bench/campaign_table.py`."""
    return sys.modules["campaign_table"]


def test_a_seed_draws_the_same_again(cases: ModuleType) -> None:
    """Sixty or more, each legal and told apart by its name, forty or more with a step that the planner prices."""
    drawn = cases.draw_cases(0, small=False)
    assert drawn == cases.draw_cases(0, small=False)
    assert drawn != cases.draw_cases(1, small=False)
    assert len({case.name for case in drawn}) == len(drawn) >= 60
    assert sum(case.rank is None for case in drawn) >= 40
    assert all(not cases._illegal(case.spec, case.layout, case.seq_len, case.global_batch) for case in drawn)
    assert all(case.layout.world_size <= 2 for case in drawn if case.rank is None)
    assert json.loads(json.dumps([case.to_json() for case in drawn])) == [
        json.loads(json.dumps(cases.from_json(json.loads(json.dumps(case.to_json()))).to_json())) for case in drawn
    ]


def test_the_pick_is_among_all_axes(cases: ModuleType) -> None:
    """One model and batch; tensor, pipeline and data parallel, every schedule and every level that the search has."""
    picks = [case for case in cases.draw_cases(0, small=False) if case.group == "pick"]
    assert len({(case.spec, case.seq_len, case.global_batch) for case in picks}) == 1
    assert {next(axis for axis in ("tp", "pp", "dp") if case.layout.size(axis) == 2) for case in picks} == {
        *("tp", "pp", "dp")
    }
    assert {case.layout.schedule for case in picks} == {"1f1b", "zero-bubble", "interleaved"}
    assert {case.layout.shard for case in picks if case.layout.dp == 2} == {"none", "optimizer", "gradients", "full"}


def predictions(cases: ModuleType, *, step_s: float, allocated: int) -> dict[str, Any]:
    """A file of predictions of two layouts, with numbers that nothing would compute."""
    drawn = [case for case in cases.draw_cases(0, small=False) if case.name in ("pick-00", "pick-18")]
    found = []
    for number, case in enumerate(drawn):
        memory = {"rank": 0, "allocated_bytes": allocated, "peer_bytes": 0, "reserved_bytes": allocated,
                  "used_bytes": allocated, "at": "here", "components": {}}  # fmt: skip
        taken = step_s * (1 + number)
        step = {"step_s": taken, "range_s": [0.9 * taken, 1.1 * taken], "breakdown": {"matmul": taken}}
        told = {"stages": [0], "check": [memory], "check_grid": [memory], "planner": [memory], "step": step}
        found.append({"case": case.to_json(), "predicted": told})
    return {"command": "by hand", "torch": "-", "profile": "-", "cases": found}


def rows(told: dict[str, Any], sealed: str, steps: tuple[float, float], allocated: int) -> list[dict[str, Any]]:
    """What a run might have measured."""
    memory = {"allocated_bytes": allocated, "unseen_bytes": 0, "reserved_bytes": allocated, "used_bytes": allocated}
    return [
        {"name": one["case"]["name"], "told_by": sealed, "ranks": [memory], "step_s": step, "grad_norm": 1.0,
         "device": "a GPU", "torch": "-"}
        for one, step in zip(told["cases"], steps, strict=True)
    ]  # fmt: skip


def test_the_table_takes_predictions_from_the_file(
    campaign: ModuleType, cases: ModuleType, tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors are of the numbers in the file, whatever the planner and the check would say by now."""
    for name in ("predict_step", "predict_memory", "rank_memory"):
        monkeypatch.setattr(campaign, name, lambda *_, **__: pytest.fail("predicted anew"))
    told = predictions(cases, step_s=1.0, allocated=1000)
    pairs = tables.joined(told, "abc", rows(told, "abc", (0.8, 4.0), 800))
    assert [pair.time_off for pair in pairs] == pytest.approx([0.25, -0.5])
    assert [one.check for one in tables.memory_errors(pairs)] == pytest.approx([0.25, 0.25])
    text = "\n".join(tables.table(told, "abc", rows(told, "abc", (0.8, 4.0), 800)))
    assert "mean 25.00%, worst +25.00%" in text
    assert "MISSED" in text


def test_rows_of_other_predictions_are_refused(cases: ModuleType, tables: ModuleType) -> None:
    """A row counts only for the file that it was run against: changed afterwards, that file has no rows."""
    told = predictions(cases, step_s=1.0, allocated=1000)
    with pytest.raises(SystemExit, match="no row was run against predictions xyz"):
        tables.joined(told, "xyz", rows(told, "abc", (0.8, 4.0), 800))


def test_what_the_pick_costs(cases: ModuleType, tables: ModuleType) -> None:
    """The layout that was told to be fastest against the one that was; a failed row stands for no time."""
    told = predictions(cases, step_s=1.0, allocated=1000)
    measured = rows(told, "abc", (1.02, 1.0), 1000)
    assert tables.regret(tables.joined(told, "abc", measured)) == pytest.approx(0.02)
    failed = [{**measured[0], "failed": "out of memory"}, measured[1]]
    assert tables.regret(tables.joined(told, "abc", failed)) == 0.0
    assert tables.regret(tables.joined(told, "abc", [*failed, measured[0]])) == pytest.approx(0.02)


def test_a_configuration_that_fails_is_a_row(campaign: ModuleType, cases: ModuleType, tmp_path: Path) -> None:
    """On two processes and on one: the others are measured, and a second call has nothing left to do."""
    wanted = ("pair-00", "pair-01", "one-00")
    drawn = [case for case in cases.draw_cases(0, small=True) if case.name in wanted]
    told = {"cases": [{"case": case.to_json()} for case in drawn]}
    told["cases"][0]["case"]["spec"]["num_attention_heads"] = 7
    (tmp_path / "few.predictions.json").write_text(json.dumps(told))
    command = (sys.executable, str(BENCH / "campaign.py"), "--run", "--small", "--results", str(tmp_path / "few"))
    for _ in range(2):
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in (tmp_path / "few.rows.jsonl").read_text().splitlines()]
        names = {row["name"]: row for row in found}
        assert set(names) == set(wanted)
        assert {name for name, row in names.items() if "failed" in row} == {drawn[0].name}
        assert all(row["told_by"] == campaign.seal(tmp_path / "few.predictions.json") for row in found)
    assert "measured" not in done.stdout


def test_nothing_is_run_that_was_not_predicted(tmp_path: Path) -> None:
    """Without a file of predictions `--run` and `--table` refuse."""
    for word in ("--run", "--table"):
        command = (sys.executable, str(BENCH / "campaign.py"), word, "--small", "--results", str(tmp_path / "none"))
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "nothing is run that was not predicted" in done.stderr

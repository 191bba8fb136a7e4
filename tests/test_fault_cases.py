"""The quick part of the fault campaigns on checkpoints: `bench/fault_cases`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from triweave.checkpoint import damaged

BENCH = Path(__file__).parent.parent / "bench"


@pytest.mark.parametrize("campaign", ["damage", "write_points", "hostile"])
def test_nothing_is_lost_and_nothing_runs(campaign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every planted fault is found, survived or refused, as the campaign counts it."""
    monkeypatch.syspath_prepend(str(BENCH))
    rows = importlib.import_module(f"fault_cases.{campaign}").run(True, tmp_path)
    assert [row for row in rows if row.good < row.tried] == []
    assert sum(row.tried for row in rows) > 20


def test_campaign_sees_a_hash_that_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If files were believed by their sizes, a file of another step would load, and the campaign tells."""
    monkeypatch.syspath_prepend(str(BENCH))
    damage = importlib.import_module("fault_cases.damage")
    checkpoints = importlib.import_module("fault_cases.small_checkpoints")
    monkeypatch.setattr(damaged, "check_file", lambda *_, **__: None)
    where, engine = tmp_path / "checkpoints", damage.small_engine(tmp_path / "model")
    for step in (1, 2):
        checkpoints.set_state(engine, step)
        checkpoints.save_small(where, engine, step)
    bench = damage._Bench(engine, where, damage.state_hash(engine))
    row = bench.row("of another step", [damage.from_step_1(where, "__0_0.distcp")])
    assert (row.tried, row.good) == (1, 0)

"""A checkpoint on demand: a file in the run's folder, and the job goes on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from command_line import TORCHRUN, Running, made_once, make_workspace, wait_until

from triweave.recovery.save_now import LOOK_S, SaveNow
from triweave.run_folder import SAVE_NOW_FILE

RANKS = ("--layout.tp=1", "--layout.pp=1", "--layout.dp=2", "--checkpoint.export=false", "--data.validation=0")
SAVED_LATE = ("--checkpoint.every_steps=1000000", "--train.steps=1000000", "--log.every_steps=1000")


@pytest.mark.parametrize("launcher", [(), (*TORCHRUN, "2", "-m")], ids=["own ranks", "torchrun"])
def test_file_asks_for_a_checkpoint(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, launcher: tuple[str, ...]
) -> None:
    """The file goes when the checkpoint is on the disk, the log says both, and the run goes on; a file is one save."""
    folder = made_once(tmp_path_factory, "asked", make_workspace)
    output = tmp_path / "out"
    words = ("-m", *launcher, "triweave", "train", "run.yaml", *RANKS, *SAVED_LATE, "--output_dir", str(output))
    with Running(*words, cwd=folder) as running:
        for count in (1, 2):
            assert wait_until((output / "metrics.jsonl").exists)
            (output / SAVE_NOW_FILE).touch()
            assert wait_until(lambda: not (output / SAVE_NOW_FILE).exists())
            kept = sorted(path.name for path in (output / "checkpoints").glob("step-*"))
            assert len(kept) == count
            saved = int((output / "checkpoints" / "latest").read_text().removeprefix("step-"))
            assert wait_until(lambda after=saved: read_lines_so_far(output)[-1] > after + 1)
        os.kill(running.process.pid, signal.SIGTERM)
        _, log, _ = running.end()
        assert running.all_gone()
    asked = re.findall(rf"^asked     by {re.escape(str(output / SAVE_NOW_FILE))}: saving (step-\d+)$", log, re.M)
    told = re.findall(r"^saved     (step-\d+): training waited", log, re.M)
    assert sorted(asked) == kept
    assert told[:2] == asked


def read_lines_so_far(output: Path) -> list[int]:
    """Steps of the whole lines of a file that is being written."""
    text = (output / "metrics.jsonl").read_text()
    return [int(step) for step in re.findall(r'^\{"step": (\d+),.*\}$', text, re.M)] or [0]


def test_file_is_looked_for_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every short step; and not again while the save that it asked for is under way."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    (tmp_path / SAVE_NOW_FILE).touch()
    first, other = SaveNow(tmp_path), SaveNow(None)
    assert (first.look(), first.look(), other.look()) == (True, False, False)
    now[0] += 2 * LOOK_S
    first.begun("step-3")
    assert not first.look()
    first.ended("step-2")  # one that was under way before
    assert (tmp_path / SAVE_NOW_FILE).exists()
    first.ended("step-3")
    assert not (tmp_path / SAVE_NOW_FILE).exists()
    (tmp_path / SAVE_NOW_FILE).touch()
    assert first.look()

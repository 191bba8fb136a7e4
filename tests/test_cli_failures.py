"""A rank that dies or raises in the middle of a step ends the run: one message, exit code 1, no process left over."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from command_line import (
    TORCHRUN,
    Running,
    errors,
    linked_workspace,
    made_once,
    make_workspace,
    read_lines,
    triweave,
    wait_until,
)

# triweave, but for what one rank does in its second forward (of four) of the second step. Ranks import this file too.
DRIVER = """\
import itertools
import os
import pathlib
import signal

import torch
import torch.distributed as dist

from triweave.llama import Stage

forward, trained = Stage.forward, itertools.count(1)


def failing(self, *arguments):
    if torch.is_grad_enabled() and dist.get_rank() == {rank} and next(trained) == 6:
        pathlib.Path("failing").touch()
        {action}
    return forward(self, *arguments)


Stage.forward = failing

if __name__ == "__main__":
    from triweave.cli import main

    main()
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
RAISES = "raise ValueError('nobody thought of this')"

NO_TORCH = """\
import sys

sys.modules["torch"] = None

if __name__ == "__main__":
    from triweave.cli import main

    main()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace that is only read."""
    return made_once(tmp_path_factory, "inputs", make_workspace)


def workspace_with(source: Path, folder: Path, **failure: object) -> Path:
    """A workspace with a driver.py in which a rank fails."""
    (linked_workspace(source, folder) / "driver.py").write_text(DRIVER.format(**failure))
    return folder


@pytest.mark.parametrize(
    ("rank", "action", "message"),
    [
        (2, DIES, "error: rank 2 was ended by SIGKILL; if nobody did, the kernel, for want of host memory"),
        (1, RAISES, "error: rank 1 failed"),
    ],
    ids=["dies", "raises"],
)
def test_failing_rank_ends_the_run(source: Path, tmp_path: Path, rank: int, action: str, message: str) -> None:
    """The other ranks wait in vain for it; they are ended, and the one message is about the rank that failed."""
    folder = workspace_with(source, tmp_path / "here", rank=rank, action=action)
    with Running("driver.py", "train", "run.yaml", cwd=folder) as running:
        assert wait_until((folder / "failing").exists)
        assert running.all_gone()
        code, _, error = running.end()
    assert code == 1
    assert errors(error) == [message]
    assert error.count("Traceback") == (action == RAISES)
    assert error.count("ValueError: nobody thought of this") == (action == RAISES)
    assert [line["step"] for line in read_lines(folder / "out" / "metrics.jsonl")] == [1]
    assert not list((folder / "out" / "checkpoints").glob("step-*"))


def test_failing_rank_ends_a_launched_run(source: Path, tmp_path: Path) -> None:
    """Under torchrun too nobody waits for it, and it says what happened."""
    folder = workspace_with(source, tmp_path / "here", rank=1, action=RAISES)
    words = ("-m", *TORCHRUN, "2", "driver.py", "train", "run.yaml", "--layout.tp=1")
    with Running(*words, cwd=folder) as running:
        assert wait_until((folder / "failing").exists)
        assert running.all_gone()
        code, _, error = running.end()
    assert code != 0
    assert errors(error)[0] == "error: rank 1 failed"


def test_ranks_do_not_outlive_the_process_that_started_them(source: Path, tmp_path: Path) -> None:
    """Killed without a chance to clean up, as by a scheduler or for memory, it leaves no rank behind."""
    folder = linked_workspace(source, tmp_path / "here")
    with Running("-m", "triweave", "train", "run.yaml", "--train.steps=10000", cwd=folder) as running:
        assert wait_until((folder / "out" / "metrics.jsonl").exists)
        running.process.send_signal(signal.SIGKILL)
        assert running.all_gone()


def test_interrupt_while_ranks_start(source: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches what is still importing torch too: it ends without a traceback."""
    folder = linked_workspace(source, tmp_path / "here")
    with Running("-m", "triweave", "train", "run.yaml", cwd=folder) as running:
        assert wait_until(lambda: len(running.alive()) == 3)  # itself, the server of ranks, a tracker of resources
        time.sleep(0.3)
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.all_gone()
        code, log, error = running.end()
    assert (code, log) == (130, "")
    assert "Traceback" not in error


def test_missing_torch_is_told_before_ranks_are_started(source: Path, tmp_path: Path) -> None:
    """Who starts ranks imports no torch, and yet says itself that there is none."""
    folder = linked_workspace(source, tmp_path / "here")
    (folder / "driver.py").write_text(NO_TORCH)
    with Running("driver.py", "train", "run.yaml", cwd=folder) as running:
        code, log, error = running.end()
        assert running.all_gone()
    assert (code, log) == (1, "")
    assert error.endswith("\nModuleNotFoundError: No module named 'torch'\n")
    assert error.count("Traceback") == 1


def test_loss_that_is_no_number_ends_the_run(source: Path, tmp_path: Path) -> None:
    """All ranks see it in the same step; it is told once, and what would be worthless is not saved."""
    folder = linked_workspace(source, tmp_path / "here")
    words = (
        *("--layout.tp=1", "--data.validation=0"),
        *("--optimizer.learning_rate=1e30", "--optimizer.warmup_steps=0", "--checkpoint.every_steps=1"),
    )
    done = triweave("train", "run.yaml", *words, cwd=folder)
    assert done.returncode == 1
    (message,) = errors(done.stderr)
    assert message.startswith("error: step 2: the loss is ")
    assert "nan" in message
    assert "Traceback" not in done.stderr
    assert {path.name for path in (folder / "out" / "checkpoints").iterdir()} == {"latest", "step-1"}
    assert not (folder / "out" / "hf").exists()

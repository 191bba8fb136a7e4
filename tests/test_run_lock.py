"""One job a run directory, on one host and on many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from triweave.checkpoint.run_lock import LOCK_FILE, claimed
from triweave.errors import InputError

FAST: dict[str, float] = {"beat_s": 0.05, "patience_s": 0.6}

HOLDER = """\
import sys, time
from pathlib import Path
from triweave.checkpoint.run_lock import claimed
with claimed(Path(sys.argv[1]), print, host=sys.argv[2], beat_s=0.05):
    print("held", flush=True)
    time.sleep(60)
"""


def quiet(line: str) -> None:
    """Say nothing."""


def holder(folder: Path, host: str) -> subprocess.Popen[str]:
    """Another process that holds a directory."""
    process = subprocess.Popen(
        (sys.executable, "-c", HOLDER, str(folder), host), stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def without_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system whose kernel locks do not reach other hosts."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)


def test_second_claim_is_refused_with_the_first(tmp_path: Path) -> None:
    """Who holds it is told: host, process and since when, and what to do; afterwards it can be had, without a trace."""
    with claimed(tmp_path, quiet, host="here"):
        with pytest.raises(InputError) as refused, claimed(tmp_path, quiet, host="here"):
            pass
        (problem,) = refused.value.problems
        since = json.loads((tmp_path / LOCK_FILE).read_text())["since"]
        assert problem.rule == f"is in use by process {os.getpid()} on here since {since}"
        assert f"remove {tmp_path / LOCK_FILE}" in str(problem.nearest)
    assert list(tmp_path.iterdir()) == []
    with claimed(tmp_path, quiet):
        pass


def test_kill_frees_it_at_once(tmp_path: Path) -> None:
    """On one host the kernel's lock goes with the process: nobody waits and nobody cleans up."""
    with holder(tmp_path, "here") as process:
        process.kill()
    begun = time.monotonic()
    with claimed(tmp_path, pytest.fail, host="here"):
        assert time.monotonic() - begun < 5.0


def test_live_holder_on_another_host_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel's lock does not reach, the holder's count goes on, and the claim is refused."""
    without_kernel_locks(monkeypatch)
    said: list[str] = []
    with holder(tmp_path, "there") as process:
        try:
            with (
                pytest.raises(InputError, match=rf"process {process.pid} on there"),
                claimed(tmp_path, said.append, host="here", **FAST),
            ):
                pass
        finally:
            process.kill()
    assert len(said) == 1
    assert "watching it for" in said[0]


def test_dead_holder_on_another_host_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that stands still is a dead process: after the time to wait the directory is taken over."""
    without_kernel_locks(monkeypatch)
    with holder(tmp_path, "there") as process:
        process.kill()
    with claimed(tmp_path, quiet, host="here", **FAST):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == "here"


def test_only_one_of_two_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts that have watched the same dead holder do not both take over."""
    without_kernel_locks(monkeypatch)
    with holder(tmp_path, "there") as process:
        process.kill()
    ends: list[str] = []

    def claim(host: str) -> None:
        try:
            with claimed(tmp_path, quiet, host=host, beat_s=0.2, patience_s=0.6, lost=lambda: ends.append("lost")):
                ends.append("has it")
                time.sleep(1.0)
        except InputError:
            ends.append("refused")

    threads = [threading.Thread(target=claim, args=(host,)) for host in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == ["has it", "refused"]


def test_holder_that_slept_too_long_ends(tmp_path: Path) -> None:
    """A process that finds another's name in its lock file says so and ends: two would write."""
    lost, said = threading.Event(), []
    with claimed(tmp_path, said.append, host="here", beat_s=0.05, lost=lost.set):
        path = tmp_path / LOCK_FILE
        other: dict[str, Any] = {**json.loads(path.read_text()), "host": "there", "token": "other"}
        path.write_text(json.dumps(other))
        assert lost.wait(10)
    assert "was taken over by process" in said[0]
    assert json.loads(path.read_text())["host"] == "there"  # it is the other's, and stays

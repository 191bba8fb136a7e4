"""Ranks of one host: the first to fail is told of, whatever the others do because of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from triweave.errors import AnswerIsNo, InputError, Problem
from triweave.training.process import GRACE_S, Process, let_segments_grow, started_by_launcher
from triweave.training.processes import meet
from triweave.training.rank_store import NAME
from triweave.training.start_ranks import Ending, _wait_for, run_ranks


def rank_main(what: Callable[[], int], process: Process) -> int:
    """Rank 1 does `what`; the others would be busy for a minute."""
    if process.rank == 1:
        return what()
    time.sleep(60)
    return 0


def refuse(kind: type[Exception]) -> int:
    """Fail."""
    raise kind("it does not fit") if kind is not InputError else InputError(Problem("a.b", 3, "is odd"))


def leave(code: int) -> int:
    """End this process as a library might."""
    os._exit(code)


def die(name: int) -> int:
    """End this process by a signal."""
    os.kill(os.getpid(), name)
    return 0


def raise_after(signal_file: Path, process: Process) -> int:
    """Fail on every rank, on rank 2 first."""
    if process.rank == 2:
        signal_file.touch()
    else:
        while not signal_file.exists():
            time.sleep(0.01)
        time.sleep(0.2)
    raise AnswerIsNo(f"said by rank {process.rank}")


def stumble_over_killed(process: Process) -> int:
    """Rank 2 is killed; the others fail at about the same time."""
    if process.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("connection closed by peer")


KILLED = "error: rank {} was ended by SIGKILL; if nobody did, the kernel, for want of host memory\n"


def answer_of(process: Process) -> int:
    """All is well but the answer."""
    return 1 if process.rank == 0 else 0


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        (functools.partial(leave, 7), 1, "error: rank 1 left with exit code 7\n"),
        (functools.partial(leave, 0), 1, "error: rank 1 left with exit code 0\n"),
        (
            functools.partial(die, signal.SIGKILL),
            1,
            KILLED.format(1),
        ),
        (functools.partial(die, signal.SIGABRT), 1, "error: rank 1 was ended by SIGABRT\n"),
        (functools.partial(refuse, AnswerIsNo), 1, "error: it does not fit\n"),
        (functools.partial(refuse, InputError), 2, "error: a.b = 3: is odd\n"),
    ],
    ids=["leaves", "leaves as if well", "is killed", "aborts", "refuses", "refuses the input"],
)
def test_rank_that_fails_ends_the_others(
    capfd: pytest.CaptureFixture[str], what: Callable[[], int], code: int, message: str
) -> None:
    """The exit code and the one message are the failing rank's, and come long before the others are done."""
    began = time.monotonic()
    assert run_ranks(3, functools.partial(rank_main, what)) == code
    assert capfd.readouterr().err == message
    assert time.monotonic() - began < 60 - GRACE_S


def test_unforeseen_error_is_told_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """It is a fault of ours, and the message says where."""
    assert run_ranks(2, functools.partial(rank_main, functools.partial(refuse, ValueError))) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: rank 1 failed\nTraceback")
    assert error.endswith("ValueError: it does not fit\n")


def test_first_of_several_failures_is_told(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What fails later may fail because of it."""
    assert run_ranks(4, functools.partial(raise_after, tmp_path / "failing")) == 1
    assert capfd.readouterr().err == "error: said by rank 2\n"


def test_killed_rank_is_the_cause(capfd: pytest.CaptureFixture[str]) -> None:
    """Others that stumble over its closed connections may be heard earlier."""
    assert run_ranks(4, stumble_over_killed) == 1
    assert capfd.readouterr().err == KILLED.format(2)


def test_earlier_failure_is_told_though_heard_later(capfd: pytest.CaptureFixture[str]) -> None:
    """What counts is when a rank failed, not when the process that waits got to hear of it."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    pipes[0][1].send(Ending(1, "the consequence", time_s=2.0))
    late = threading.Timer(0.1, pipes[1][1].send, [Ending(1, "the cause", time_s=1.0)])
    late.start()
    unused = multiprocessing.Process()
    assert _wait_for({told: unused for told, _ in pipes}) == (1, "the cause")
    assert capfd.readouterr().err == "error: the cause\n"
    for end in itertools.chain(*pipes):
        end.close()


def test_ctrl_c_during_the_import_of_torch_is_not_lost() -> None:
    """It comes while torch imports numpy, waits until that is done, and is raised then."""
    code = (
        "import os, signal, sys\n"
        "from triweave.training.import_torch import import_torch\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "try:\n"
        "    import_torch()\n"
        "except KeyboardInterrupt:\n"
        "    import torch\n"
        "    print('heard', torch.ones(2).numpy().sum())\n"
    )
    done = subprocess.run((sys.executable, "-W", "ignore", "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout == "heard 2.0\n"


def test_answer_is_the_first_rank_s(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that returns 1 gives the run's exit code without a word."""
    assert run_ranks(2, answer_of) == 1
    assert capfd.readouterr().err == ""


def write_where_the_store_listens(file: Path, process: Process) -> int:
    """The ranks meet; rank 0 writes down the addresses at which somebody listens on the port of their store."""
    store = meet(process, 30.0)
    assert store is not None
    store.set(f"here/{process.rank}", "")
    store.wait([f"here/{rank}" for rank in range(process.world_size)])
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == process.store_port
    ]
    if process.rank == 0:
        file.write_text(" ".join(address.rpartition(":")[0] for address in listening))
    return 0


def test_store_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    """The kernel's table of sockets has its port at 127.0.0.1 and nowhere else (pytorch issue 173909)."""
    file = tmp_path / "addresses"
    assert run_ranks(2, functools.partial(write_where_the_store_listens, file)) == 0
    assert file.read_text() == "0100007F"


def keeper(store_port: int | None) -> int:
    """Who holds the socket that listens on the port: the process id."""
    (inode,) = [
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == store_port
    ]
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.readlink(held) == f"socket:[{inode}]" for held in folder.iterdir()):
                return int(folder.parent.name)
    raise AssertionError("nobody listens")


def lose_the_store(process: Process) -> int:
    """Rank 1 ends the keeper of the store, for which rank 0 waits."""
    store = meet(process, 60.0)
    assert store is not None
    if process.rank == 1:
        os.kill(keeper(process.store_port), signal.SIGKILL)
        time.sleep(60)
    store.wait(["what nobody sets"])
    return 0


def test_store_that_is_lost_ends_the_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """It is the one that is told of, whatever the ranks say that wait for it, and nobody waits for a time-out."""
    began = time.monotonic()
    assert run_ranks(3, lose_the_store) == 1
    assert capfd.readouterr().err == KILLED.format(1).replace("rank 1", NAME)
    assert time.monotonic() - began < 60 - GRACE_S


LAUNCHED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_launcher_says_who_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's variables name this process; without them there is no launcher."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert started_by_launcher() is None
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert started_by_launcher() == Process(5, 8, 1, 4)


@pytest.mark.parametrize("name", LAUNCHED)
def test_launcher_that_says_half_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every variable is needed; the missing one is named."""
    for other, value in LAUNCHED.items():
        monkeypatch.setenv(other, value)
    monkeypatch.delenv(name)
    with pytest.raises(InputError, match=f"lacks {name}; torchrun sets all 6"):
        started_by_launcher()


@pytest.mark.parametrize(("name", "value"), [("RANK", "8"), ("RANK", "one"), ("LOCAL_RANK", "4"), ("WORLD_SIZE", "-1")])
def test_launcher_that_says_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A rank must be a number below the number of ranks."""
    for other, said in LAUNCHED.items():
        monkeypatch.setenv(other, said)
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as refused:
        started_by_launcher()
    assert [problem.key for problem in refused.value.problems] == [name]


@pytest.mark.parametrize("chosen", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_is_the_user_s_to_set_up(monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    """Segments grow unless the user has said anything of the allocator, by either of its names."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(chosen, "max_split_size_mb:64")
    let_segments_grow()
    set_up = os.environ.get(chosen or "PYTORCH_ALLOC_CONF")
    assert set_up == ("max_split_size_mb:64" if chosen else "expandable_segments:True")
    assert chosen != "PYTORCH_CUDA_ALLOC_CONF" or "PYTORCH_ALLOC_CONF" not in os.environ

"""A folder is built once, whoever asks, and whoever dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from triweave.data import once as once_module
from triweave.data.once import MARK, build_once
from triweave.errors import InputError, Problem, RunFailed


def finish(folder: Path) -> None:
    (folder / MARK).write_text("{}")


def never(folder: Path) -> None:
    raise AssertionError("must not build")


def once(target: Path, build: Callable[[Path], None] = finish, *, timeout_s: float = 20, silent_s: float = 20) -> None:
    build_once(target, build, timeout_s=timeout_s, silent_s=silent_s)


def claim(target: Path, host: str, pid: int, number: int = 0) -> Path:
    path = target.with_name(f"{target.name}.attempt-{number}")
    path.write_text(json.dumps({"host": host, "pid": pid}))
    return path


def hold_forever(target: Path, claimed: str) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        Path(claimed).touch()
        time.sleep(60)

    once(target, build)


def test_second_call_finds_the_folder(tmp_path: Path) -> None:
    """What is there is not built again, and nothing is left beside it."""
    once(tmp_path / "deep" / "x")
    once(tmp_path / "deep" / "x", never)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x"]


def test_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    """Eight callers at once: one build, and nobody returns before it is done."""
    builders: list[int] = []
    done: list[bool] = []

    def build(folder: Path) -> None:
        builders.append(threading.get_ident())
        time.sleep(0.5)
        finish(folder)

    def call() -> None:
        once(tmp_path / "x", build)
        done.append((tmp_path / "x" / MARK).exists())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builders) == 1
    assert done == [True] * 8


def test_killed_builder_is_replaced_at_once(tmp_path: Path) -> None:
    """A builder of this machine whose process is gone is not waited for; its half-made folder is swept away."""
    target, claimed = tmp_path / "x", tmp_path / "claimed"
    process = multiprocessing.get_context("spawn").Process(target=hold_forever, args=(target, str(claimed)))
    process.start()
    deadline = time.monotonic() + 20
    while not claimed.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    claimed.unlink()
    began = time.monotonic()
    once(target)
    assert time.monotonic() - began < 5
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_silent_builder_elsewhere_is_replaced_by_one(tmp_path: Path) -> None:
    """Of another machine only the silence can be seen; of four who wait one takes over."""
    target = tmp_path / "x"
    claim(target, "elsewhere", 1)
    builders: list[int] = []

    def build(folder: Path) -> None:
        builders.append(1)
        time.sleep(0.3)
        finish(folder)

    threads = [threading.Thread(target=once, args=(target, build), kwargs={"silent_s": 0.6}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builders == [1]


def test_live_builder_elsewhere_is_waited_for(tmp_path: Path) -> None:
    """Signs of life put off the taking over, however long it takes."""
    target = tmp_path / "x"
    path = claim(target, "elsewhere", 1)

    def live() -> None:
        for _ in range(8):
            time.sleep(0.2)
            os.utime(path)
        target.mkdir()
        finish(target)

    thread = threading.Thread(target=live)
    thread.start()
    once(target, never, silent_s=0.6)
    thread.join()


def test_claim_of_an_instant_ago_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two who look at the same instant see no claim, both try, and one of them finds the file taken."""
    target = tmp_path / "x"
    claim(target, "elsewhere", 1)
    newest, looks = once_module._newest, iter([None])
    monkeypatch.setattr(once_module, "_newest", lambda target: next(looks, newest(target)))
    with pytest.raises(RunFailed, match="process 1 on elsewhere is still building"):
        once(target, never, timeout_s=0.3)
    assert next(looks, "looked") == "looked"


def test_waiting_ends_with_the_holder_named(tmp_path: Path) -> None:
    """The message says who holds it, and what to delete."""
    path = claim(tmp_path / "x", "elsewhere", 17)
    with pytest.raises(
        RunFailed, match=r"waited 0 s for .*, which process 17 on elsewhere is still building"
    ) as raised:
        once(tmp_path / "x", never, timeout_s=0.3)
    assert str(raised.value).endswith(f"delete {path}")


def failing(error: BaseException, started: threading.Event) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        started.set()
        time.sleep(0.6)
        raise error

    return build


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InputError([Problem("a", 1, "r", "2", "f:3"), Problem("b", None, "s")]), InputError, "f:3: a = 1: r; nearest"),
        (RunFailed("disk"), RunFailed, "could not prepare the data: disk"),
        (OSError("full"), RunFailed, "could not prepare the data: OSError: full"),
    ],
)
def test_failure_reaches_all_who_wait_and_no_later_call(
    tmp_path: Path, error: BaseException, kind: type[Exception], message: str
) -> None:
    """Those who waited get the builder's own problems; who comes later tries again, for it may be mended."""
    target, started = tmp_path / "x", threading.Event()
    raised: list[BaseException] = []

    def call() -> None:
        try:
            once(target, failing(error, started))
        except BaseException as caught:
            raised.append(caught)

    thread = threading.Thread(target=call)
    thread.start()
    started.wait()
    with pytest.raises(kind, match=message):
        once(target, never)
    thread.join()
    assert raised == [error]
    once(target)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("fails", [False, True])
def test_builder_that_was_overtaken_gives_way(tmp_path: Path, fails: bool) -> None:
    """Given up for dead and waking up late, it keeps what the faster one made."""
    target = tmp_path / "x"

    def build(folder: Path) -> None:
        target.mkdir()
        (target / MARK).write_text("faster")
        finish(folder)
        if fails:
            raise OSError("the folder was swept away")

    once(target, build)
    assert (target / MARK).read_text() == "faster"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_foreign_folder_in_the_way_is_named(tmp_path: Path) -> None:
    """A folder of that name that is not ours is never overwritten."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.txt").write_text("precious")
    with pytest.raises(RunFailed, match="is in the way"):
        once(tmp_path / "x")
    assert (tmp_path / "x" / "thesis.txt").read_text() == "precious"

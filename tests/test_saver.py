"""Saving beside training: the copy is what is saved, one save is under way, and its end is always asked."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dense import Held, assemble, differences, held_slices
from ranks import Ranks
from saving import engine_on, progress, save, train
from tiny_configs import tiny_config

from triweave.checkpoint.damaged import damage
from triweave.checkpoint.kept import found
from triweave.checkpoint.local_store import LocalStore
from triweave.checkpoint.places import open_store
from triweave.groups import alone
from triweave.host_room import HostRoom
from triweave.layout import Layout
from triweave.model_spec import spec_from_folder
from triweave.training import saver as saver_module
from triweave.training.checkpoints import load_checkpoint
from triweave.training.saver import Saved, Saver

KINDS = ("weight", "exp_avg", "exp_avg_sq")


class SlowStore(LocalStore):
    """A disk that writes nothing until it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.goes = threading.Event()

    def begin(self, name: str) -> str:
        """Wait first."""
        assert self.goes.wait(60)
        return super().begin(name)


def next_news(saver: Saver) -> list[Saved]:
    """Wait for the save that is under way."""
    while not (news := saver.news()):
        time.sleep(0.01)
    return news


def test_training_goes_on_while_it_is_saved(tmp_path: Path) -> None:
    """What is on the disk is the state at the call, though training has changed it before a byte was written."""
    model = tiny_config(tmp_path / "model")
    engine, spec, store = engine_on(model, Layout()), spec_from_folder(model), SlowStore(tmp_path / "checkpoints")
    train(engine, 1)
    saver = Saver(store, engine, 3, "auto")
    at_call = assemble(spec, [held_slices(engine)])
    saver.save(progress(1), "")
    train(engine, 2)
    assert saver.news() == []
    store.goes.set()
    saver.finish()
    (saved,) = saver.news()
    assert (saved.name, saved.problem, saver.failed, saver.unsaved) == ("step-1", None, 0, None)
    assert saved.stall_s < saved.total_s
    load_checkpoint(tmp_path / "checkpoints" / "step-1", engine)
    assert differences(assemble(spec, [held_slices(engine)]), at_call, *KINDS) == []


def test_same_bytes_beside_training_and_before_it(tmp_path: Path) -> None:
    """The tensors' file of a save from a copy is that of a save that training waits for, byte for byte."""
    engine = engine_on(tiny_config(tmp_path / "model"), Layout())
    train(engine, 1)
    files = [
        Path(save(tmp_path / how, engine, 1, asynchronous=how), "__0_0.distcp").read_bytes()  # type: ignore[arg-type]
        for how in ("auto", "off")
    ]
    # torch writes a hash of the record's content and no time: equal states are equal files.
    assert files[0] == files[1]


def test_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """Never two at once: the second save begins when the first has ended, and both are whole."""
    engine = engine_on(tiny_config(tmp_path / "model"), Layout())
    store = SlowStore(tmp_path / "checkpoints")
    saver = Saver(store, engine, 3, "auto")
    saver.save(progress(1), "")
    threading.Timer(0.3, store.goes.set).start()
    saver.save(progress(2), "")
    assert damage(store, "step-1", alone()) is None
    saver.finish()
    assert [saved.name for saved in saver.news()] == ["step-1", "step-2"]
    assert damage(store, "step-2", alone()) is None


@pytest.mark.parametrize("asynchronous", ["auto", "off"])
def test_failure_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: Any
) -> None:
    """A disk that is full fails that save alone, whatever thread it happens in; the next one is good."""
    engine = engine_on(tiny_config(tmp_path / "model"), Layout())
    save(tmp_path / "c", engine, 1, keep=1)
    saver = Saver(open_store(tmp_path / "c"), engine, 1, asynchronous)

    def full(handle: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        saver.save(progress(2), "")
        news = next_news(saver)
    (line,) = news[0].lines
    assert line.startswith("NOT SAVED cannot save")
    assert "step-2: No space left on device" in line
    assert (saver.failed, found(LocalStore(tmp_path / "c"))) == (1, ["step-1"])
    saver.save(progress(3), "")
    saver.finish()
    assert (saver.failed, saver.unsaved, found(LocalStore(tmp_path / "c"))) == (1, None, ["step-3"])


def test_what_a_thread_raises_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody thought of, in the thread that writes, is a save that failed."""
    engine = engine_on(tiny_config(tmp_path / "model"), Layout())

    def broken(*_: object) -> None:
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(saver_module, "write_snapshot", broken)
    saver = Saver(open_store(tmp_path / "c"), engine, 1, "auto")
    saver.save(progress(2), "")
    saver.finish()
    assert str(saver.unsaved).endswith("step-2: ZeroDivisionError: in the thread")


def test_without_room_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where host memory has no room for a copy, none is made, the log says so, and saves are good."""
    engine = engine_on(tiny_config(tmp_path / "model"), Layout())
    monkeypatch.setattr(saver_module, "host_room", lambda: HostRoom(2000, 1000))
    saver = Saver(open_store(tmp_path / "c"), engine, 1, "auto")
    assert saver.method.startswith("training waits for the disk: copies would take")
    saver.save(progress(1), "")
    assert [saved.problem for saved in saver.news()] == [None]


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    """Python's, numpy's and torch's generators give after loading what they gave after saving."""

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311

    engine = engine_on(tiny_config(tmp_path / "model"), Layout())
    draw()
    checkpoint = save(tmp_path / "c", engine, 1)
    after = draw()
    assert draw() != after
    load_checkpoint(checkpoint, engine)
    assert draw() == after


# --- many ranks -------------------------------------------------------------------------------------------------------


def train_and_save(rank: int, folder: Path, layout: Layout, where: Path) -> list[list[Held]]:
    """Six steps without a pause between them, a save beside each; the state at each save."""
    engine = engine_on(folder, layout)
    saver = Saver(open_store(where), engine, 9, "auto")
    states = []
    for step in range(1, 7):
        train(engine, 1)
        states.append(held_slices(engine))
        saver.save(progress(step), "")
    saver.finish()
    assert saver.failed == 0, saver.news()
    return states


def test_ranks_save_beside_training(ranks: Ranks, tmp_path: Path) -> None:
    """Collectives of training and of saves do not disturb each other: each of six checkpoints is that step's state."""
    folder, layout = tiny_config(tmp_path / "model"), Layout(tp=2, dp=2)
    spec = spec_from_folder(folder)
    answers = ranks.run(4, train_and_save, folder, layout, tmp_path / "c")
    engine = engine_on(folder, Layout())
    for step in range(1, 7):
        load_checkpoint(tmp_path / "c" / f"step-{step}", engine)
        expected = assemble(spec, [states[step - 1] for states in answers])
        assert differences(assemble(spec, [held_slices(engine)]), expected, *KINDS) == []


def fail_on_rank(rank: int, folder: Path, where: str, guilty: int, call: str) -> tuple[list[Saved], float]:
    """A save, one that fails on one rank, and one more, with a training step after each."""
    engine = engine_on(folder, Layout(dp=2))
    saver = Saver(open_store(where), engine, 1, "auto")
    saver.save(progress(1), "")
    train(engine, 1)
    saved = next_news(saver)
    dist.barrier()
    original = getattr(os, call)

    def refuse(*arguments: object, **options: object) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*arguments, **options)

    if rank == guilty:
        setattr(os, call, refuse)
    try:
        saver.save(progress(2), "")
        loss, _ = train(engine, 1)[0]
        saved += next_news(saver)
    finally:
        setattr(os, call, original)
    dist.barrier()
    saver.save(progress(3), "")
    saver.finish()
    return saved + saver.news(), loss


@pytest.mark.parametrize(("guilty", "call"), [(1, "write"), (1, "fsync"), (0, "rename"), (0, "mkdir")])
def test_one_rank_fails_the_save_for_all(ranks: Ranks, tmp_path: Path, guilty: int, call: str) -> None:
    """All ranks hear which rank could not write and why, the former checkpoint stays, and the next save is good."""
    folder = tiny_config(tmp_path / "model")
    where = str(tmp_path / "c")
    for saved, _ in ranks.run(2, fail_on_rank, folder, where, guilty, call):
        problems = [one.problem for one in saved]
        assert problems == [None, f"cannot save {where}/step-2: rank {guilty}: Input/output error", None]
    assert found(LocalStore(tmp_path / "c")) == ["step-3"]
    assert damage(LocalStore(tmp_path / "c"), "step-3", alone()) is None
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["latest", "step-3"]

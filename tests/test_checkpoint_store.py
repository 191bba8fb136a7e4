"""A checkpoint exists whole or not at all, on a disk and behind a URL; the newest whole ones are kept."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from dense import assemble, differences, held_slices
from on_disk import names
from saving import engine_on, progress, save, train
from tiny_configs import tiny_config

from triweave.checkpoint.damaged import damage
from triweave.checkpoint.kept import damage_at_a_glance, found, retire
from triweave.checkpoint.local_store import LocalStore
from triweave.checkpoint.manifest import read_manifest
from triweave.checkpoint.places import locate, open_store
from triweave.checkpoint.store import DamagedCheckpoint
from triweave.errors import RunFailed
from triweave.groups import alone
from triweave.layout import Layout
from triweave.model_spec import spec_from_folder
from triweave.training.checkpoints import load_checkpoint
from triweave.training.engine import Engine
from triweave.training.run_progress import read_progress


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of a tiny Llama."""
    return tiny_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def small(model: Path) -> Engine:
    """A one-process engine that is only saved and loaded."""
    return engine_on(model, Layout())


@pytest.fixture(params=["disk", "memory", "url-of-a-disk"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for checkpoints of each kind."""
    places = {"disk": str(tmp_path), "memory": f"memory://{tmp_path.name}", "url-of-a-disk": f"file://{tmp_path}"}
    return places[request.param]


def damages(where: str | Path) -> dict[str, str | None]:
    """What is wrong with each checkpoint, every byte read."""
    store = open_store(where)
    return {name: damage(store, name, alone()) for name in found(store)}


class TestEveryPlace:
    def test_state_comes_back(self, model: Path, where: str) -> None:
        """What was saved is loaded bit for bit, with its position, and torch's own format lies underneath."""
        engine = engine_on(model, Layout())
        train(engine, 2)
        spec, before = spec_from_folder(model), held_slices(engine)
        checkpoint = save(where, engine, 2)
        train(engine, 1)
        assert load_checkpoint(checkpoint, engine) == read_progress(checkpoint) == progress(2, updates=2)
        kinds = ("weight", "exp_avg", "exp_avg_sq")
        assert differences(assemble(spec, [held_slices(engine)]), assemble(spec, [before]), *kinds) == []
        store, name = locate(checkpoint)
        files = {"__0_0.distcp", ".metadata", "progress.json", "random.json", "run.yaml"}
        assert set(read_manifest(store, name).files) == files
        assert set(store.sizes(name)) == files | {"manifest.json"}

    def test_only_the_newest_are_kept(self, small: Engine, where: str) -> None:
        """`keep` counts by step, not by name: step 10 is newer than step 9."""
        for step in (8, 9, 10, 11):
            save(where, small, step, keep=3)
        assert damages(where) == {"step-11": None, "step-10": None, "step-9": None}
        assert open_store(where).hint() == "step-11"

    def test_without_manifest_it_does_not_exist(self, small: Engine, where: str) -> None:
        """What a save has left that was stopped before its end is passed over, told, and swept."""
        save(where, small, 1)
        store = open_store(where)
        working = store.begin("step-2")
        with store.create(working, "__0_0.distcp") as file:
            file.write(b"half")
        assert damages(where)["step-1"] is None
        assert damages(where).get("step-2", "missing") is not None
        store.sweep()
        assert found(store) == ["step-1"]
        assert working not in store.names()

    def test_same_step_again_is_replaced_whole(self, model: Path, where: str) -> None:
        """A checkpoint of that step is replaced file by file or not at all: no file of the former one is left."""
        engine = engine_on(model, Layout())
        former = read_manifest(*locate(save(where, engine, 3)))
        train(engine, 1)
        store, name = locate(save(where, engine, 3))
        manifest = read_manifest(store, name)
        assert manifest.save_id != former.save_id
        assert manifest.files["__0_0.distcp"] != former.files["__0_0.distcp"]
        assert damages(where) == {"step-3": None}

    def test_file_that_fails_is_not_there(self, where: str) -> None:
        """A file whose writing is given up leaves nothing that has a manifest's name."""
        store = open_store(where)
        working = store.begin("step-1")

        def write() -> None:
            with store.create(working, "manifest.json") as file:
                file.write(b"{")
                raise KeyError

        with pytest.raises(KeyError):
            write()
        store.sweep()
        assert found(store) == []


class TestRetention:
    def test_damaged_ones_do_not_count(self, small: Engine, tmp_path: Path) -> None:
        """The last whole checkpoint stays, however many newer ones are damaged."""
        for step in (1, 2, 3):
            save(tmp_path, small, step)
        store = LocalStore(tmp_path)
        (tmp_path / "step-3" / "__0_0.distcp").unlink()
        assert retire(store, keep=1, bad={"step-2"}) == []
        assert retire(store, keep=1) == ["step-1"]
        (tmp_path / "step-2" / ".metadata").unlink()
        assert retire(store, keep=1) == []
        assert names(tmp_path) == ["latest", "step-2", "step-3"]

    @pytest.mark.parametrize("hint", ["step-9", "../step-1", "nonsense", "", "step-01"])
    def test_hint_is_only_a_hint(self, small: Engine, tmp_path: Path, hint: str) -> None:
        """Whatever `latest` says, what is there is found, and nothing else."""
        save(tmp_path, small, 1)
        (tmp_path / "latest").write_text(hint)
        assert found(LocalStore(tmp_path)) == ["step-1"]

    def test_hint_helps_where_a_listing_lags(
        self, small: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A checkpoint that a shared disk does not list yet is found by its hint."""
        save(tmp_path, small, 1)
        monkeypatch.setattr(LocalStore, "names", lambda self: [])
        assert found(LocalStore(tmp_path)) == ["step-1"]


class TestDisk:
    def test_everything_is_on_the_disk_before_the_name(
        self, small: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All files and their folder are flushed before the rename, the parent after it, and only then goes the old."""
        events: list[str] = []
        rename, fsync = os.rename, os.fsync

        def flushed(handle: int) -> None:
            events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
            fsync(handle)

        def renamed(source: Any, target: Any, **how: Any) -> None:
            events.append(f"{Path(source).name} -> {Path(target).name}")
            rename(source, target, **how)

        save(tmp_path, small, 1)
        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(os, "rename", renamed)
        save(tmp_path, small, 2, keep=1)
        (number,) = [number for number, event in enumerate(events) if event.endswith("-> step-2")]
        working = events[number].split(" -> ")[0]
        assert {*names(tmp_path / "step-2"), working} <= set(events[:number])
        assert events[number - 2 : number] == ["manifest.json", working]
        assert events[number + 1] == tmp_path.name
        assert events[-1].startswith("step-1 -> .step-1.")
        assert names(tmp_path) == ["latest", "step-2"]

    @pytest.mark.parametrize("what", ["__0_0.distcp", "manifest.json"])
    def test_links_are_refused(self, small: Engine, tmp_path: Path, what: str) -> None:
        """A file that is a link to a right one, and a checkpoint that is a link to a right one, are not read."""
        save(tmp_path / "there", small, 1)
        shutil.copytree(tmp_path / "there", tmp_path / "here")
        (tmp_path / "here" / "step-1" / what).unlink()
        (tmp_path / "here" / "step-1" / what).symlink_to(tmp_path / "there" / "step-1" / what)
        (tmp_path / "here" / "step-2").symlink_to(tmp_path / "there" / "step-1")
        store = LocalStore(tmp_path / "here")
        assert found(store) == ["step-1"]
        assert what in str(damage_at_a_glance(store, "step-1"))
        assert damage_at_a_glance(store, "step-2") is not None

    def test_what_stepped_aside_comes_back(self, small: Engine, tmp_path: Path) -> None:
        """Killed between the two renames of a replacement, the former checkpoint is found again by the next start."""
        save(tmp_path, small, 1)
        (tmp_path / "step-1").rename(tmp_path / ".step-1.0123456789ab.former")
        store = LocalStore(tmp_path)
        assert found(store) == []
        store.sweep()
        assert damages(tmp_path) == {"step-1": None}

    def test_manifest_that_was_edited_is_refused(self, small: Engine, tmp_path: Path) -> None:
        """A manifest whose list was changed to fit changed files is no manifest any more."""
        path = Path(save(tmp_path, small, 1)) / "manifest.json"
        found = json.loads(path.read_text())
        found["files"]["run.yaml"]["bytes"] += 1
        path.write_text(json.dumps(found))
        with pytest.raises(DamagedCheckpoint, match=r"manifest.json is not as it was written"):
            read_manifest(LocalStore(tmp_path), "step-1")

    def test_disk_that_stores_something_else_is_seen(
        self, small: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A save reads back what it wrote: a disk that changed a byte fails it, and the former checkpoint stays."""
        save(tmp_path, small, 1, keep=1)
        write = os.write

        def write_wrongly(handle: int, data: memoryview) -> int:
            wrong = bytearray(data)
            wrong[len(wrong) // 2] ^= 4
            return write(handle, wrong)

        monkeypatch.setattr(os, "write", write_wrongly)
        with pytest.raises(RunFailed, match=r"step-2: \S+ has changed since it was written"):
            save(tmp_path, small, 2, keep=1)
        monkeypatch.undo()
        assert names(tmp_path) == ["latest", "step-1"]
        assert damages(tmp_path) == {"step-1": None}

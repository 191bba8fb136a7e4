"""Two runs that name one place for their checkpoints are kept apart, at the same time and one after the other."""

from __future__ import annotations

import re
import threading
import time
import uuid
from pathlib import Path

import pytest
from command_line import Running, errors, linked_workspace, made_once, make_workspace, triweave, wait_until

from triweave.checkpoint.kept import found
from triweave.checkpoint.manifest import Manifest, read_manifest
from triweave.checkpoint.owner import Owner, new_owner, read_owner, write_owner
from triweave.checkpoint.places import open_store
from triweave.checkpoint.remote_lock import leased
from triweave.checkpoint.remote_store import RemoteStore
from triweave.checkpoint.run_lock import LOCK_FILE
from triweave.checkpoint.save import write_checkpoint
from triweave.checkpoint.store import DamagedCheckpoint, Store
from triweave.errors import InputError, RunFailed
from triweave.groups import alone

ALONE = ("--layout.tp=1", "--layout.pp=1", "--checkpoint.export=false", "--data.validation=0")
SHARED = ("--checkpoint.path=shared", *ALONE)
FAST = {"beat_s": 0.05, "patience_s": 0.6, "settle_s": 0.2}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data for all tests of the module."""
    return made_once(tmp_path_factory, "owners", make_workspace)


@pytest.fixture
def folder(workspace: Path, tmp_path: Path) -> Path:
    """A folder to run in."""
    return linked_workspace(workspace, tmp_path / "here")


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A place on a disk, and one that is an object store."""
    return open_store(tmp_path / "c" if request.param == "disk" else f"memory://{uuid.uuid4()}")


def quiet(line: str) -> None:
    """Say nothing."""


def test_other_run_s_checkpoints_are_not_gone_on_from(folder: Path) -> None:
    """Another output_dir with the same checkpoint.path is refused; told to, it takes over, and the first is refused."""
    first = triweave("train", "run.yaml", *SHARED, "--output_dir=a", "--train.steps=3", cwd=folder)
    assert first.returncode == 0, first.stderr
    saved = open_store(folder / "shared")
    second = triweave("train", "run.yaml", *SHARED, "--output_dir=b", "--train.steps=6", cwd=folder)
    assert second.returncode == 2
    assert errors(second.stderr) == [
        "error: checkpoint.path = shared: holds step-3 of another run than that of b;"
        " nearest: another place, or resume: shared/step-3 once, to take it over"
    ]
    assert found(saved) == ["step-3"]
    words = ("--output_dir=b", "--train.steps=6")
    taken = triweave("train", "run.yaml", *SHARED, *words, "--resume=shared/step-3", cwd=folder)
    assert taken.returncode == 0, taken.stderr
    assert "resumed   at step 3" in taken.stdout
    # From now on they are the second one's: it goes on by itself, and the first is refused.
    again = triweave("train", "run.yaml", *SHARED, "--output_dir=b", "--train.steps=7", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "resumed   at step 6" in again.stdout
    back = triweave("train", "run.yaml", *SHARED, "--output_dir=a", "--train.steps=9", cwd=folder)
    assert back.returncode == 2
    assert "holds step-7 of another run than that of a" in back.stderr


def test_another_run_s_place_behind_a_url_is_taken_over(folder: Path) -> None:
    """What the refusal says is to be done can be done there too: `resume` takes a URL."""
    place = f"--checkpoint.path=file://{folder}/shared"
    first = triweave("train", "run.yaml", place, *ALONE, "--output_dir=a", "--train.steps=3", cwd=folder)
    assert first.returncode == 0, first.stderr
    words = ("train", "run.yaml", place, *ALONE, "--output_dir=b", "--train.steps=6")
    refused = triweave(*words, cwd=folder)
    assert refused.returncode == 2
    (said,) = re.findall(r"resume: (\S+) once", refused.stderr)
    taken = triweave(*words, f"--resume={said}", cwd=folder)
    assert taken.returncode == 0, taken.stderr
    assert "resumed   at step 3" in taken.stdout


def test_job_in_the_same_place_is_refused(folder: Path) -> None:
    """While one job writes there, another with a folder of its own is refused: the lock lies beside the checkpoints."""
    words = ("train", "run.yaml", *SHARED, "--checkpoint.every_steps=0")
    with Running("-m", "triweave", *words, "--output_dir=a", "--train.steps=100000", cwd=folder) as running:
        assert wait_until((folder / "a" / "metrics.jsonl").exists)
        second = triweave(*words, "--output_dir=b", cwd=folder)
        running.process.kill()
        assert running.all_gone()
    assert second.returncode == 2
    (message,) = errors(second.stderr)
    assert message.startswith(f"error: checkpoint.path = shared: is in use by process {running.process.pid} on ")
    assert message.endswith(f"remove shared/{LOCK_FILE}")


def test_copied_folder_goes_on(folder: Path) -> None:
    """Checkpoints that somebody has put into a run's own folder are that run's."""
    first = triweave("train", "run.yaml", *ALONE, "--output_dir=a", "--train.steps=3", cwd=folder)
    assert first.returncode == 0, first.stderr
    (folder / "b").mkdir()
    (folder / "a" / "checkpoints").rename(folder / "b" / "checkpoints")
    second = triweave("train", "run.yaml", *ALONE, "--output_dir=b", "--train.steps=6", cwd=folder)
    assert second.returncode == 0, second.stderr
    assert "resumed   at step 3" in second.stdout


def test_save_over_another_run_s_fails(store: Store) -> None:
    """Where two get past the lock, whoever saves second is told, and the other's checkpoint is untouched."""
    first, second = new_owner(), new_owner()
    write_checkpoint(store, "step-2", {}, {}, alone(), first)
    store.give_hint("step-2")
    before = read_manifest(store, "step-2")
    for name in ("step-2", "step-3"):
        with pytest.raises(RunFailed, match=f"cannot save .*{name}: step-2 there is of another run"):
            write_checkpoint(store, name, {}, {}, alone(), second)
    assert found(store) == ["step-2"]
    assert read_manifest(store, "step-2") == before
    write_checkpoint(store, "step-3", {}, {}, alone(), second.taking_over(first.run))
    assert read_manifest(store, "step-3").run == second.run


def test_manifest_without_a_run_is_anybody_s() -> None:
    """What `convert` writes names no run, and is read; a run that is put in afterwards is damage."""
    assert Owner("a").owns("")
    content = Manifest("x", {}, "a").to_bytes()
    assert b'"run": "a"' in content
    assert b'"run"' not in Manifest("x", {}).to_bytes()


def test_changed_run_in_a_manifest_is_damage(tmp_path: Path) -> None:
    """The manifest's hash covers who wrote it."""
    store = open_store(tmp_path)
    write_checkpoint(store, "step-1", {}, {}, alone(), Owner("a" * 32))
    path = tmp_path / "step-1" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"a" * 32, b"b" * 32))
    with pytest.raises(DamagedCheckpoint):
        read_manifest(store, "step-1")


def test_identity_stays(tmp_path: Path) -> None:
    """It is read as it was written; a damaged one is none."""
    owner = new_owner().taking_over("other")
    write_owner(tmp_path, owner)
    assert read_owner(tmp_path) == owner
    (tmp_path / "identity.json").write_text('{"run": ""}')
    assert read_owner(tmp_path) is None


def test_second_lease_of_another_run_is_refused() -> None:
    """In an object store the holder's count goes on, and the claim of another run is refused until it has left."""
    store = RemoteStore(f"memory://{uuid.uuid4()}")
    said: list[str] = []
    with leased(store, "a", quiet, **FAST):
        with (
            pytest.raises(InputError, match="is in use by another run, process"),
            leased(store, "b", said.append, **FAST),
        ):
            pass
        assert "watching it for" in said[0]
    assert store.read_small(LOCK_FILE) is None
    with leased(store, "b", pytest.fail, **FAST):
        pass


def test_dead_lease_is_followed() -> None:
    """A count that stands still is a dead job: another run waits for it, the same run need not."""
    store = RemoteStore(f"memory://{uuid.uuid4()}")
    with leased(store, "a", quiet, beat_s=60.0, settle_s=0.01):
        left = store.read_small(LOCK_FILE)
    assert left is not None
    store.write_small(LOCK_FILE, left)
    begun = time.monotonic()
    with leased(store, "a", pytest.fail, **FAST):
        assert time.monotonic() - begun < FAST["patience_s"]
    store.write_small(LOCK_FILE, left)
    said: list[str] = []
    with leased(store, "b", said.append, **FAST):
        assert len(said) == 1


def test_only_one_of_two_gets_an_empty_place() -> None:
    """Two that come at the same time: the last to write has it, or the first, if the other saw its signs of life."""
    store = RemoteStore(f"memory://{uuid.uuid4()}")
    ends: list[str] = []

    def claim(run: str) -> None:
        try:
            with leased(store, run, quiet, beat_s=0.1, patience_s=5.0, settle_s=1.0, lost=lambda: None):
                ends.append("has it")
                time.sleep(3.0)
        except InputError:
            ends.append("refused")

    threads = [threading.Thread(target=claim, args=(run,)) for run in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == ["has it", "refused"]


def test_holder_that_lost_its_lease_ends() -> None:
    """A holder that finds another's name says so and ends, and leaves the other's object alone."""
    store, lost, said = RemoteStore(f"memory://{uuid.uuid4()}"), threading.Event(), []
    with leased(store, "a", said.append, beat_s=0.05, settle_s=0.01, lost=lost.set):
        other = b'{"host": "there", "pid": 1, "since": "now", "token": "other", "run": "b"}'
        store.write_small(LOCK_FILE, other)
        assert lost.wait(10)
    assert "was taken over by process 1 on there" in said[0]
    assert store.read_small(LOCK_FILE) == other

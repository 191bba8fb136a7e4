"""A rank that writes several files at once: the same state, an even share of the bytes, and all of them or none."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from dense import assemble, differences, held_slices
from hypothesis import given
from hypothesis import strategies as st
from on_disk import flip
from saving import engine_on, save, train
from tiny_configs import tiny_config
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from triweave.checkpoint import save as save_module
from triweave.checkpoint import writer as writer_module
from triweave.checkpoint.damaged import damage
from triweave.checkpoint.durable import HashedFile
from triweave.checkpoint.kept import found
from triweave.checkpoint.local_store import LocalStore
from triweave.checkpoint.manifest import read_manifest
from triweave.checkpoint.places import locate, open_store
from triweave.checkpoint.writer import even_parts
from triweave.errors import RunFailed
from triweave.groups import alone
from triweave.layout import Layout
from triweave.model_spec import spec_from_folder
from triweave.training.checkpoints import load_checkpoint

FILES = {f"__0_{number}.distcp" for number in range(3)}


@pytest.fixture
def _three_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host of many cores, with so much to write that it pays."""
    monkeypatch.setattr(save_module, "files_at_once", lambda: 3)
    monkeypatch.setattr(writer_module, "FILE_BYTES", 1024)


def item(number: int, numel: int) -> WriteItem:
    """A float32 vector to write."""
    size = torch.Size((numel,))
    data = TensorWriteData(ChunkStorageMetadata(torch.Size((0,)), size), TensorProperties(torch.float32), size)
    return WriteItem(MetadataIndex(str(number)), WriteItemType.SHARD, tensor_data=data)


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6), st.integers(1, 5000))
def test_shares_are_even(sizes: list[int], most: int, least_bytes: int) -> None:
    """Every item once and in order; no more files than asked, none that is not worth it; none much above its share."""
    items = [item(number, size) for number, size in enumerate(sizes)]
    parts = even_parts(items, most, least_bytes)
    assert [one for part in parts for one in part] == items
    wanted = max(1, min(most, 4 * sum(sizes) // least_bytes))
    assert 1 <= len(parts) <= wanted
    share = sum(sizes) / wanted
    assert all(sum(sizes[int(one.index.fqn)] for one in part) <= share + max(sizes, default=0) for part in parts)


@pytest.mark.usefixtures("_three_files")
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_state_comes_back_from_several_files(tmp_path: Path, kind: str) -> None:
    """Bit for bit, and each file is in the manifest, on a disk (which is read back) and behind a URL."""
    model, where = (
        tiny_config(tmp_path / "model"),
        str(tmp_path / "c") if kind == "disk" else f"memory://{tmp_path.name}",
    )
    engine = engine_on(model, Layout())
    train(engine, 2)
    spec, before = spec_from_folder(model), held_slices(engine)
    checkpoint = save(where, engine, 2)
    train(engine, 1)
    load_checkpoint(checkpoint, engine)
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    assert differences(assemble(spec, [held_slices(engine)]), assemble(spec, [before]), *kinds) == []
    store, name = locate(checkpoint)
    manifest = read_manifest(store, name)
    assert {file for file in manifest.files if file.endswith(".distcp")} == FILES
    sizes = [manifest.files[file].bytes for file in FILES]
    assert max(sizes) < 2 * min(sizes)
    assert damage(store, name, alone()) is None


@pytest.mark.usefixtures("_three_files")
@pytest.mark.parametrize("moment", ["written", "read back"])
def test_one_file_that_fails_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Whichever thread meets it: the save fails and says why, and the checkpoint before it stays the newest."""
    engine = engine_on(tiny_config(tmp_path / "model"), Layout())
    save(tmp_path / "c", engine, 1, keep=2)
    real = LocalStore.create

    @contextmanager
    def fails(self: LocalStore, folder: str, name: str) -> Iterator[HashedFile]:
        with real(self, folder, name) as file:
            if name == "__0_1.distcp" and moment == "written":
                raise OSError(errno.ENOSPC, "No space left on device")
            yield file
        if name == "__0_2.distcp" and moment == "read back":
            flip(self.root / folder / name)

    monkeypatch.setattr(LocalStore, "create", fails)
    with pytest.raises(RunFailed, match="No space left" if moment == "written" else "__0_2.distcp has changed"):
        save(tmp_path / "c", engine, 2, keep=2)
    store = open_store(tmp_path / "c")
    assert found(store) == ["step-1"]
    assert [name for name in store.names() if "partial" in name] == []

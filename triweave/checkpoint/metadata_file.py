"""Reads a checkpoint in the format of torch's distributed checkpoint (DCP) without running what it may hold.

torch keeps the table of contents, `.metadata`, as a pickle, and reads it with `pickle.load` (2.13), which runs any
code that the file names. Here it may name the parts of a table of contents and nothing else, and every entry must lie
inside a file of the same folder.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from triweave.checkpoint.places import locate
from triweave.checkpoint.saved_tensor import numbers_of
from triweave.checkpoint.store import DamagedCheckpoint, plain_name, read_bytes
from triweave.checkpoint.writer import CONTENTS_FILE
from triweave.errors import InputError, Problem

_CONTENTS = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_ALLOWED = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    # Megatron-Core keeps the plans of its ranks there too.
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *((_CONTENTS, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
    (_CONTENTS, "BytesStorageMetadata"),
    *((_CONTENTS, name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
}
"""The classes that the table of contents of a checkpoint of tensors is made of."""


class CheckpointReader(StorageReader):
    """A reader of one checkpoint for `torch.distributed.checkpoint.load`."""

    def __init__(self, checkpoint: str | Path) -> None:
        self.checkpoint = checkpoint
        self._store, self._folder = locate(checkpoint)
        self._contents: Metadata | None = None
        self._tensors: dict[str, TensorStorageMetadata] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader is of one checkpoint."""

    def read_metadata(self) -> Metadata:
        """The table of contents; read once. What it says may still be wrong.

        Raises:
            InputError: there is none, it is damaged, or it names anything but the parts of a table of contents.
        """
        if self._contents is None:
            try:
                sizes = self._store.sizes(self._folder)
                # 530 bytes a tensor and rank were measured, a small model's come to 0.03 % of its data.
                limit = 2 * 2**20 + min(sum(sizes.values()) // 100, 2**28)
                content = read_bytes(self._store, self._folder, CONTENTS_FILE, limit)
                contents = _Unpickler(io.BytesIO(content)).load()
            # Damaged bytes may ask the unpickler for anything, and so raise anything.
            except Exception as error:
                raise self._wrong(f" ({error})") from None
            if not isinstance(contents, Metadata):
                raise self._wrong("")
            self._contents = contents
        return self._contents

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What the checkpoint holds, by name, once every part of it is known to lie inside a file of the folder.

        Raises:
            InputError: some part does not, or is no part of a tensor.
        """
        if self._tensors is None:
            contents = self.read_metadata()
            try:
                sizes = self._store.sizes(self._folder)
                tensors = {}
                for name, table in contents.state_dict_metadata.items():
                    if not (type(name) is str and isinstance(table, TensorStorageMetadata)):
                        raise DamagedCheckpoint(f"{name!r:.80}", "is no tensor")
                    tensors[name] = table
                    for chunk in table.chunks:
                        _check_place(table, chunk, contents.storage_data[MetadataIndex(name, chunk.offsets)], sizes)
            # A class of the list may have been given any attributes.
            except Exception as error:
                raise self._wrong(f" ({error})") from None
            self._tensors = tensors
        return self._tensors

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the table of contents is our own."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors that the plan asks for; each stored part is read once.

        Raises:
            ValueError: a stored part is not what the table of contents says.
            OSError: a file cannot be read.
        """
        tensors, places = self.tensors(), self.read_metadata().storage_data
        wanted: dict[str, dict[MetadataIndex, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise ValueError(f"{item.storage_index.fqn} is no tensor")
            wanted[places[item.storage_index].relative_path][item.storage_index].append(item)
        shapes = {
            MetadataIndex(name, chunk.offsets): tuple(chunk.sizes)
            for name, table in tensors.items()
            for chunk in table.chunks
        }
        for name, parts in wanted.items():
            with self._store.open(self._folder, name) as file:
                for index, items in parts.items():
                    file.seek(places[index].offset)
                    archive = file.read(places[index].length)
                    stored = numbers_of(archive, shapes[index], tensors[index.fqn].properties.dtype)
                    for item in items:
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(narrow_tensor_by_index(stored, item.storage_offsets, item.lengths))
                        planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No other place can be asked for."""
        return False

    def _wrong(self, why: str) -> InputError:
        path = f"{self.checkpoint}/{CONTENTS_FILE}"
        return InputError(Problem("resume", path, f"is no table of contents of a checkpoint{why}"))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _check_place(
    table: TensorStorageMetadata, chunk: ChunkStorageMetadata, place: _StorageInfo, sizes: Mapping[str, int]
) -> None:
    """Refuse a part that is not inside its tensor, or whose bytes are not inside a file of the folder."""
    name = plain_name(place.relative_path)
    numbers = (*chunk.offsets, *chunk.sizes, *table.size, place.offset, place.length)
    counted = all(type(number) is int and number >= 0 for number in numbers)
    shaped = len(chunk.offsets) == len(chunk.sizes) == len(table.size)
    if not counted or not shaped or place.transform_descriptors is not None:
        raise DamagedCheckpoint(name, "is described by no numbers")
    inside = all(o + s <= whole for o, s, whole in zip(chunk.offsets, chunk.sizes, table.size, strict=True))
    if not inside or prod(chunk.sizes) * table.properties.dtype.itemsize > place.length:
        raise DamagedCheckpoint(name, "holds less than a part of a tensor that should be there")
    if place.offset + place.length > sizes.get(name, 0):
        raise DamagedCheckpoint(name, "is missing, or shorter than it was")

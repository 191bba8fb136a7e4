"""Writes torch's distributed checkpoint piece by piece: no process group, and one piece in memory.

torch's own writer asks for a whole state dict, and keeps the last piece of every tensor until its file is complete
(2.13). The format asks for less: pieces saved one after the other, and a table of contents at the end.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from math import prod
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from triweave.checkpoint.durable import FileRecord, HashedFile
from triweave.checkpoint.writer import CONTENTS_FILE

_FORMAT_VERSION = "1.0.0"


@dataclass
class _Announced:
    shape: tuple[int, ...]
    chunks: list[ChunkStorageMetadata] = field(default_factory=list)
    elements: int = 0


class ArchiveWriter:
    """Fills a folder with a checkpoint that torch's loader reads. A context manager; leaving it closes the files.

    Args:
        create: makes a new file of the folder by its name, durable when its block ends.
        shapes: every tensor by name.
        dtype: of all of them.
        max_file_bytes: a file that has reached this size is followed by another.
    """

    def __init__(
        self,
        create: Callable[[str], AbstractContextManager[HashedFile]],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        max_file_bytes: int,
    ) -> None:
        self._create, self._dtype, self._max_file_bytes = create, dtype, max_file_bytes
        self._announced = {name: _Announced(shape) for name, shape in shapes.items()}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._objects: list[str] = []
        self._zeros: dict[tuple[int, ...], _StorageInfo] = {}
        self._stack = ExitStack()
        self._file: tuple[str, HashedFile] | None = None
        self.records: dict[str, FileRecord] = {}
        """Size and hash of every file, once it is complete."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def write(self, name: str, offsets: Sequence[int], values: Tensor) -> None:
        """Store one piece of a tensor, converted to the checkpoint's type.

        Raises:
            OSError: the disk refuses.
        """
        stored = values.detach().to("cpu", self._dtype).contiguous()
        if stored.untyped_storage().nbytes() != stored.nbytes:
            stored = stored.clone()  # or all that it is a view of would be saved
        self._add(name, offsets, tuple(stored.shape), self._save(stored))

    def write_zeros(self, name: str, offsets: Sequence[int], sizes: tuple[int, ...]) -> None:
        """Store a piece that is all zeros; equal pieces share their bytes."""
        if sizes not in self._zeros:
            self._zeros[sizes] = self._save(torch.zeros(sizes, dtype=self._dtype))
        self._add(name, offsets, sizes, self._zeros[sizes])

    def write_object(self, name: str, value: object) -> None:
        """Store a plain value."""
        self._objects.append(name)
        self._places[MetadataIndex(name)] = self._save(value)

    def finish(self) -> None:
        """Write the table of contents.

        Raises:
            ValueError: a tensor is not complete.
            OSError: the disk refuses.
        """
        self._end_file()
        short = [name for name, tensor in self._announced.items() if tensor.elements != prod(tensor.shape)]
        if short:
            raise ValueError(f"{len(short)} tensors of the checkpoint are not complete: {short[0]} first")
        properties = TensorProperties(dtype=self._dtype)
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks=tensor.chunks)
            for name, tensor in self._announced.items()
        }
        entries |= {name: BytesStorageMetadata() for name in self._objects}
        contents = Metadata(entries, storage_data=self._places, storage_meta=StorageMeta(), version=_FORMAT_VERSION)
        with self._create(CONTENTS_FILE) as file:
            pickle.dump(contents, file)
            self.records[CONTENTS_FILE] = file.finish()

    def _add(self, name: str, offsets: Sequence[int], sizes: tuple[int, ...], place: _StorageInfo) -> None:
        tensor = self._announced[name]
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self._places[MetadataIndex(name, chunk.offsets, len(tensor.chunks))] = place
        tensor.chunks.append(chunk)
        tensor.elements += prod(sizes)

    def _save(self, value: object) -> _StorageInfo:
        if self._file is not None and self._file[1].tell() >= self._max_file_bytes:
            self._end_file()
        if self._file is None:
            # torch's own name for file n of rank 0.
            name = f"__0_{len(self.records)}.distcp"
            self._file = name, self._stack.enter_context(self._create(name))
        name, file = self._file
        begin = file.tell()
        torch.save(value, file)
        return _StorageInfo(name, begin, file.tell() - begin)

    def _end_file(self) -> None:
        if self._file is not None:
            name, file = self._file
            self.records[name] = file.finish()
            self._file = None
        self._stack.close()

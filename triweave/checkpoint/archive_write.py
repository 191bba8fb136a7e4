"""Writes torch's distributed checkpoint piece by piece: no process group, and one piece in memory.

torch's own writer asks for a whole state dict, and keeps the last piece of every tensor until its file is complete
(2.13). The format asks for less: pieces saved one after the other, and a table of contents at the end.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

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

from triweave.checkpoint.durable import sync

CONTENTS_FILE = ".metadata"
_FORMAT_VERSION = "1.0.0"


@dataclass
class _Announced:
    shape: tuple[int, ...]
    chunks: list[ChunkStorageMetadata] = field(default_factory=list)
    elements: int = 0


class ArchiveWriter:
    """Fills a folder with a checkpoint that torch's loader reads.

    Args:
        folder: an empty folder.
        shapes: every tensor by name.
        dtype: of all of them.
        max_file_bytes: a file that has reached this size is followed by another.
    """

    def __init__(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_file_bytes: int
    ) -> None:
        self._folder, self._dtype, self._max_file_bytes = folder, dtype, max_file_bytes
        self._announced = {name: _Announced(shape) for name, shape in shapes.items()}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._objects: list[str] = []
        self._zeros: dict[tuple[int, ...], _StorageInfo] = {}
        self._files: list[Path] = []
        self._stream: Any = None

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
        """Write the table of contents and wait until everything is on the disk.

        Raises:
            ValueError: a tensor is not complete.
            OSError: the disk refuses.
        """
        self.close()
        short = [name for name, tensor in self._announced.items() if tensor.elements != prod(tensor.shape)]
        if short:
            raise ValueError(f"{len(short)} tensors of the checkpoint are not complete: {short[0]} first")
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=self._dtype), torch.Size(tensor.shape), chunks=tensor.chunks
            )
            for name, tensor in self._announced.items()
        }
        entries |= {name: BytesStorageMetadata() for name in self._objects}
        metadata = Metadata(entries, storage_data=self._places, storage_meta=StorageMeta(), version=_FORMAT_VERSION)
        contents = self._folder / CONTENTS_FILE
        contents.write_bytes(pickle.dumps(metadata))
        for path in (*self._files, contents, self._folder):
            sync(path)

    def close(self) -> None:
        """Close the file that is being written."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _add(self, name: str, offsets: Sequence[int], sizes: tuple[int, ...], place: _StorageInfo) -> None:
        tensor = self._announced[name]
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self._places[MetadataIndex(name, chunk.offsets, len(tensor.chunks))] = place
        tensor.chunks.append(chunk)
        tensor.elements += prod(sizes)

    def _save(self, value: object) -> _StorageInfo:
        if self._stream is None or self._stream.tell() >= self._max_file_bytes:
            self.close()
            # torch's own name for file n of rank 0.
            self._files.append(self._folder / f"__0_{len(self._files)}.distcp")
            self._stream = self._files[-1].open("xb")
        begin = self._stream.tell()
        torch.save(value, self._stream)
        return _StorageInfo(self._files[-1].name, begin, self._stream.tell() - begin)

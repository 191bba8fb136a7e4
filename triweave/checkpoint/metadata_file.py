"""Reads a distributed checkpoint without running what somebody may have put into it.

torch keeps a checkpoint's table of contents, `.metadata`, as a pickle, and reads it with `pickle.load` (2.13), which
runs any code that the file names. `CheckpointReader` can go when torch reads it in another way; the tensors
themselves it reads with `weights_only=True`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

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


class CheckpointReader(FileSystemReader):
    """torch's reader of a checkpoint folder, whose `.metadata` may hold a table of contents and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of contents.

        Raises:
            InputError: there is none, it is damaged, or it names anything but the parts of a table of contents.
        """
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        # Damaged bytes may ask the unpickler for anything, and so raise anything.
        except Exception as error:
            raise InputError(Problem("resume", path, f"is no table of contents of a checkpoint ({error})")) from None
        if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
            raise InputError(Problem("resume", path, "is no table of contents of a checkpoint"))
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")

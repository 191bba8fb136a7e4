"""Writes a rank's part of a checkpoint in the format of torch's distributed checkpoint (DCP), through a `Store`.

torch's own writer overwrites by default, loses the errors of its threads (pytorch issue 191391, open for 2.13) and
knows no hash. This one writes new files and hashes what it writes. A rank with much to write writes several files at
once: a file's checksum, its hash and its way to the disk follow each other in one thread, 0.6 GB/s where each alone
does 1.5 to 4.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from triweave.checkpoint.durable import FileRecord
from triweave.checkpoint.store import Store

CONTENTS_FILE = ".metadata"
"""torch's name for the table of contents."""

FILE_BYTES = 2**28
"""A second file of a rank begins to pay from about here."""

RANKS_OF_A_HOST, MOST_FILES = 8, 4
"""A host's cores are shared by as many ranks, and so many files of each are enough for any disk."""


def files_at_once() -> int:
    """How many files a rank may write, and read back, at the same time."""
    return max(1, min(MOST_FILES, (os.cpu_count() or 1) // RANKS_OF_A_HOST))


class CheckpointWriter(StorageWriter):
    """One rank's writer for one save; `records` tells what it has written."""

    def __init__(self, store: Store, folder: str, most_files: int) -> None:
        """At most `most_files` of this rank are written at once."""
        self._store, self._folder, self._most_files = store, folder, most_files
        self.records: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the beginning of its files' names."""
        return [replace(plan, storage_data=f"__{rank}_") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, those of a file one behind the other, each as torch saves it."""
        parts = even_parts(plan.items, self._most_files, FILE_BYTES)
        names = [f"{plan.storage_data}{number}.distcp" for number in range(len(parts))]
        with ThreadPoolExecutor(len(parts), thread_name_prefix="write") as threads:
            written = list(threads.map(partial(self._write_file, planner), names, parts))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for results in written for result in results])
        return done

    def _write_file(self, planner: SavePlanner, name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        results = []
        with self._store.create(self._folder, name) as file:
            for item in items:
                if item.type == WriteItemType.BYTE_IO:
                    raise ValueError(f"{item.index.fqn} is no tensor")
                start = file.tell()
                torch.save(_on_host(planner.resolve_data(item)), file)
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            self.records[name] = file.finish()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents, once every rectangle of it is known to be written.

        Raises:
            RuntimeError: some are not.
        """
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        tables = metadata.state_dict_metadata.values()
        planned = sum(len(table.chunks) for table in tables if isinstance(table, TensorStorageMetadata))
        if planned != len(metadata.storage_data):
            raise RuntimeError(f"{planned} parts of tensors were to be written and {len(metadata.storage_data)} were")
        with self._store.create(self._folder, CONTENTS_FILE) as file:
            pickle.dump(metadata, file)
            self.records[CONTENTS_FILE] = file.finish()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No other place can be asked for."""
        return False


def even_parts(items: Sequence[WriteItem], most: int, least_bytes: int) -> list[list[WriteItem]]:
    """Items for each file, in their order, of about equal bytes: at most `most` files, fewer for less to write."""
    sizes = [_bytes_of(item) for item in items]
    number = max(1, min(most, sum(sizes) // least_bytes))
    parts: list[list[WriteItem]] = [[] for _ in range(number)]
    before = 0
    for item, size in zip(items, sizes, strict=True):
        # By its middle: an item belongs where most of it lies.
        parts[min(number - 1, number * (2 * before + size) // max(1, 2 * sum(sizes)))].append(item)
        before += size
    return [part for part in parts if part] or [[]]


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _on_host(values: Any) -> Tensor:
    """A tensor whose storage holds it and nothing else, for `torch.save` writes whole storages."""
    tensor: Tensor = values.detach().cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()

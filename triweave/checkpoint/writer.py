"""Writes a rank's part of a checkpoint in the format of torch's distributed checkpoint (DCP), through a `Store`.

torch's own writer overwrites by default, loses the errors of its threads (pytorch issue 191391, open for 2.13) and
knows no hash. This one writes one new file a rank, in the thread that called it, and hashes what it writes.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from triweave.checkpoint.durable import FileRecord
from triweave.checkpoint.store import Store

CONTENTS_FILE = ".metadata"
"""torch's name for the table of contents."""


class CheckpointWriter(StorageWriter):
    """One rank's writer for one save; `records` tells what it has written."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self.records: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the name of its file."""
        return [replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors one behind the other, each as torch saves it."""
        name: str = plan.storage_data
        results = []
        with self._store.create(self._folder, name) as file:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    raise ValueError(f"{item.index.fqn} is no tensor")
                start = file.tell()
                torch.save(_on_host(planner.resolve_data(item)), file)
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            self.records[name] = file.finish()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

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


def _on_host(values: Any) -> Tensor:
    """A tensor whose storage holds it and nothing else, for `torch.save` writes whole storages."""
    tensor: Tensor = values.detach().cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()

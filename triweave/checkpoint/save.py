"""One save: every rank writes its part, all agree that it is whole, and only then does the checkpoint exist."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from triweave.checkpoint.agreement import gather
from triweave.checkpoint.durable import FileRecord
from triweave.checkpoint.manifest import Manifest, check_file
from triweave.checkpoint.owner import Owner, check_owned
from triweave.checkpoint.slices import Slices, SlicesSavePlanner
from triweave.checkpoint.store import MANIFEST_FILE, DamagedCheckpoint, Store, reason_of
from triweave.checkpoint.writer import CheckpointWriter, files_at_once
from triweave.errors import RunFailed
from triweave.groups import Group


def write_checkpoint(
    store: Store,
    name: str,
    state: dict[str, Slices],
    documents: Mapping[str, bytes],
    group: Group,
    owner: Owner | None = None,
) -> None:
    """Write a checkpoint called `name`. All ranks of `group` call it together.

    Either it exists afterwards, whole and on the disk, or nothing has changed and every rank raises the same.

    Args:
        store: where.
        name: folder of the checkpoint; one that is there already is replaced as a whole.
        state: what this rank holds of each tensor.
        documents: further small files; the first rank's are written.
        group: of CPU tensors (gloo), and nobody else's: a save may be under way while others communicate.
        owner: the run that writes, on the first rank; None where no run does.

    Raises:
        RunFailed: which rank could not write, and why; or the newest checkpoint there, or the one that is to be
            replaced, is another run's.
    """
    first = group.rank == 0
    working = ""
    try:
        with _Attempt(store, name, group) as attempt:
            if first:
                if owner is not None:
                    check_owned(store, {name, store.hint() or name}, owner)
                working = store.begin(name)
        working = attempt.agree(working)[0]
        writer = CheckpointWriter(store, working, files_at_once())
        with _Attempt(store, name, group) as attempt:
            _write_tensors(state, writer, group)
            if store.reads_back:
                _read_back(store, working, writer.records)
        said = attempt.agree({file: asdict(record) for file, record in writer.records.items()})
        with _Attempt(store, name, group) as attempt:
            if first:
                files = {file: FileRecord(**record) for rank in said for file, record in rank.items()}
                for file, content in documents.items():
                    with store.create(working, file) as target:
                        target.write(content)
                        files[file] = target.finish()
                run = owner.run if owner is not None else ""
                store.commit(working, name, Manifest(uuid.uuid4().hex, files, run).to_bytes())
        attempt.agree(None)
    except RunFailed:
        if first and working:
            _clean_up(store, working, name)
        raise


class _Attempt:
    """Work of every rank that may fail on any of them: `agree` ends it for all, or fails for all."""

    def __init__(self, store: Store, name: str, group: Group) -> None:
        self._store, self._name, self._group = store, name, group
        self._problem: str | None = None

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        # Not only errors of the disk: whatever one rank met, the others are told, and training goes on.
        # (CheckpointException is no Exception; torch raises it on all ranks.)
        if isinstance(error, Exception | CheckpointException):
            self._problem = _cause(error)
        return self._problem is not None

    def agree(self, mine: Any) -> list[Any]:
        """What all ranks say, if all of them were successful.

        Raises:
            RunFailed: the first rank that was not, and its reason.
        """
        said = gather({"problem": self._problem, "said": None if self._problem else mine}, self._group)
        for rank, answer in enumerate(said):
            if answer["problem"] is not None:
                place = f"rank {rank}: " if self._group.size > 1 and "rank " not in answer["problem"] else ""
                raise RunFailed(f"cannot save {self._store.where}/{self._name}: {place}{answer['problem']}")
        return [answer["said"] for answer in said]


def _write_tensors(state: dict[str, Slices], writer: CheckpointWriter, group: Group) -> None:
    planner = SlicesSavePlanner()
    if group.size > 1:
        save(state, storage_writer=writer, planner=planner, process_group=group.handle)
        return
    # What `save` does, without its warning that it is alone.
    planner.set_up_planner(state, is_coordinator=True)
    plans, contents = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(contents, [writer.write_data(planner.finish_plan(plan), planner).value()])


def _read_back(store: Store, folder: str, records: Mapping[str, FileRecord]) -> None:
    """Compare what the disk has with what was written, as many files at once as were written at once."""
    with ThreadPoolExecutor(files_at_once(), thread_name_prefix="read back") as threads:
        for read in [threads.submit(check_file, store, folder, *record, fresh=True) for record in records.items()]:
            read.result()


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(failure)}"
    if isinstance(error, OSError):
        return reason_of(error)
    return str(error) if isinstance(error, DamagedCheckpoint | RunFailed) else f"{type(error).__name__}: {error}"


def _clean_up(store: Store, working: str, name: str) -> None:
    """Give the space back, if the disk lets us; otherwise the next start does."""
    try:
        # In a store without renames both names are one, and the manifest may have been the last thing written.
        if working != name or MANIFEST_FILE not in store.sizes(name):
            store.delete(working)
    except OSError:
        return

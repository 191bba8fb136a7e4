"""Checkpoints of a run: `RUN_DIR/checkpoints/step-N/`, written whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from triweave import __version__
from triweave.checkpoint.durable import sync
from triweave.checkpoint.metadata_file import CheckpointReader
from triweave.checkpoint.slices import Rectangle, Slices, SlicesLoadPlanner, SlicesSavePlanner, rectangles
from triweave.errors import InputError, Problem, RunFailed
from triweave.model_spec import ModelSpec
from triweave.training.engine import Engine
from triweave.training.optimizer import Part

PROGRESS_FILE = "progress.json"
KINDS = ("weight", "exp_avg", "exp_avg_sq")
"""What is saved of each tensor: the float32 master and Adam's two moments."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is, and what it must find again to go on."""

    step: int
    """Optimizer steps done; with the seed it is also the position in the data."""
    seed: int
    global_batch: int
    data: str
    """Fingerprint of the training data."""
    layout: str
    triweave: str = __version__
    torch: str = torch.__version__


def save_checkpoint(folder: Path, engine: Engine, progress: RunProgress, keep: int) -> Path:
    """Write `folder/step-N`, then delete all but the newest `keep`. All ranks call it together.

    Raises:
        RunFailed: the disk refuses.
    """
    target = folder / f"step-{progress.step}"
    partial = folder / f".step-{progress.step}.partial"
    first = engine.groups.rank == 0
    try:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _barrier(engine)
        with _quiet():
            save(
                _state(engine),
                storage_writer=FileSystemWriter(partial, single_file_per_rank=True),
                planner=SlicesSavePlanner(),
                no_dist=engine.groups.world.size == 1,
            )
        if first:
            (partial / PROGRESS_FILE).write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")
            # torch has flushed its own files.
            sync(partial / PROGRESS_FILE)
            sync(partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            sync(folder)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old)
    except CheckpointException as error:
        raise RunFailed(f"cannot save {target}: {_cause(error)}") from None
    except OSError as error:
        raise RunFailed(f"cannot save {target}: {error.strerror}") from None
    _barrier(engine)
    return target


def load_checkpoint(folder: Path, engine: Engine) -> RunProgress:
    """Bring weights and optimizer back to where `folder` was written. All ranks call it together.

    Raises:
        InputError: the folder is no checkpoint, or that of another model, or damaged.
    """
    progress = read_progress(folder)
    reader = CheckpointReader(folder)
    for unit in engine.sharding.units:
        unit.own()
    _check_model(reader.read_metadata(), engine.spec, folder)
    try:
        with _quiet():
            load(
                _state(engine),
                storage_reader=reader,
                planner=SlicesLoadPlanner(),
                no_dist=engine.groups.world.size == 1,
            )
    except CheckpointException as error:
        raise InputError(Problem("resume", folder, f"is a damaged checkpoint ({_cause(error)})")) from None
    for _, moments in engine.optimizer.states():
        moments["step"].fill_(progress.step)
    engine.sharding.publish()
    return progress


def read_progress(folder: Path) -> RunProgress:
    """How far the run was when `folder` was written.

    Raises:
        InputError: it is no checkpoint, or not a whole one.
    """
    try:
        values = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
        return RunProgress(**values)
    except (OSError, ValueError, TypeError):
        raise InputError(Problem("resume", folder, f"is no checkpoint: it has no readable {PROGRESS_FILE}")) from None


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a run's `checkpoints` folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _step_of(path))]
    return [path for _, path in sorted(found) if (path / PROGRESS_FILE).is_file()]


def _check_model(saved: Metadata, spec: ModelSpec, folder: Path) -> None:
    """Refuse the checkpoint of another model: one that is larger would be loaded in part."""
    there = {
        name: list(entry.size)
        for name, entry in saved.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    here = {f"{kind}.{tensor.name}": list(tensor.shape) for kind in KINDS for tensor in spec.tensors()}
    for name in (*here, *there):
        if there.get(name) != here.get(name):
            sizes = f"{there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
            rule = f"holds another model: {name} is {sizes}"
            raise InputError(Problem("resume", folder, rule))


def _cause(error: CheckpointException) -> str:
    """What the first rank that failed says."""
    failure, _ = next(iter(error.failures.values()))
    return str(failure) or type(failure).__name__


def _step_of(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"step-(\d+)", path.name)


def _state(engine: Engine) -> dict[str, Slices]:
    """Master weights and both moments under Hugging Face names, as this rank holds them."""
    parts: dict[str, tuple[tuple[int, ...], list[Rectangle]]] = {}
    for part, moments in engine.optimizer.states():
        values = (part.parameter.data, moments["exp_avg"], moments["exp_avg_sq"])
        for kind, flat in zip(KINDS, values, strict=True):
            for name, shape, rectangle in _rectangles_of(part, flat):
                parts.setdefault(f"{kind}.{name}", (shape, []))[1].append(rectangle)
    return {key: Slices(shape, held) for key, (shape, held) in parts.items()}


def _rectangles_of(part: Part, flat: Tensor) -> Iterator[tuple[str, tuple[int, ...], Rectangle]]:
    """What `flat`, laid out as the part of a unit's shard, holds of each Hugging Face tensor."""
    first = part.unit.shard_start + part.inside.start
    last = part.unit.shard_start + part.inside.stop
    for segment in part.unit.segments():
        start, stop = max(segment.start, first), min(segment.stop, last)
        if start < stop:
            held = flat[start - first : stop - first]
            for rectangle in rectangles(segment.piece, start - segment.start, held):
                yield segment.piece.name, segment.piece.shape, rectangle


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning that a single process saves or loads; that is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _barrier(engine: Engine) -> None:
    if engine.groups.world.size > 1:
        dist.barrier(**_device_ids(engine))


def _device_ids(engine: Engine) -> dict[str, Any]:
    device = engine.groups.device
    return {"device_ids": [device.index]} if device.type == "cuda" else {}

"""What a checkpoint of a run holds, out of an engine and into one. `checkpoint.save` says how it gets to the disk."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from triweave.checkpoint.agreement import gather
from triweave.checkpoint.host_copy import HostCopy
from triweave.checkpoint.kept import name_of
from triweave.checkpoint.metadata_file import CheckpointReader
from triweave.checkpoint.owner import Owner
from triweave.checkpoint.places import locate
from triweave.checkpoint.random_states import random_states, restore_random_states
from triweave.checkpoint.save import write_checkpoint
from triweave.checkpoint.slices import Rectangle, Slices, SlicesLoadPlanner, rectangles
from triweave.checkpoint.store import DamagedCheckpoint, Store, read_bytes
from triweave.errors import InputError, Problem
from triweave.groups import Group
from triweave.model_spec import ModelSpec
from triweave.moments import MOMENTS_BYTES
from triweave.run_folder import MASTER_BYTES
from triweave.training.engine import Engine
from triweave.training.optimizer import Part
from triweave.training.run_progress import PROGRESS_FILE, RunProgress, read_progress

RANDOM_FILE = "random.json"
RUN_FILE = "run.yaml"
KINDS = ("weight", "exp_avg", "exp_avg_sq")
"""What is saved of each tensor: the float32 master and Adam's two moments, as they are stored."""

_RANDOM_LIMIT_BYTES = 2**28
"""Of 10,000 ranks."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this rank at the end of a step. Without a host copy it is the state itself, not a picture of it."""

    progress: RunProgress
    run_file: str
    """The resolved run file."""
    tensors: dict[str, Slices]
    random: dict[str, Any]


def take_snapshot(engine: Engine, progress: RunProgress, run_file: str, copy: HostCopy | None = None) -> Snapshot:
    """This rank's state; copied, if there is room for a copy (of `snapshot_bytes`), so that training can go on."""
    _, state = next(engine.optimizer.states())
    progress = replace(progress, updates=int(state["step"]))
    return Snapshot(progress, run_file, _tensors_of(engine, copy), random_states(engine.groups.device))


def snapshot_bytes(engine: Engine) -> list[int]:
    """Sizes of the tensors that a snapshot copies, in its order."""
    moments = MOMENTS_BYTES[engine.optimizer.config.moments] // 2
    return [
        part.parameter.numel() * size for part in engine.optimizer.parts for size in (MASTER_BYTES, moments, moments)
    ]


def write_snapshot(store: Store, snapshot: Snapshot, group: Group, owner: Owner | None = None) -> str:
    """Write a checkpoint of what all ranks of `group` hold; returns its name. They call it together.

    `owner` is the run that it names, on the first rank.

    Raises:
        RunFailed: which rank could not write, and why. Nothing has changed then.
    """
    name = name_of(snapshot.progress.step)
    random = gather(snapshot.random, group)
    documents = {
        RUN_FILE: snapshot.run_file.encode(),
        RANDOM_FILE: json.dumps(random).encode(),
        PROGRESS_FILE: (json.dumps(asdict(snapshot.progress), indent=2) + "\n").encode(),
    }
    write_checkpoint(store, name, snapshot.tensors, documents, group, owner)
    return name


def load_checkpoint(checkpoint: str | Path, engine: Engine) -> RunProgress:
    """Bring weights, optimizer and random states back to where `checkpoint` was written. All ranks call it together.

    Its hashes are not looked at here: see `checkpoint.kept.damage`. Its moments may have another type than the run's:
    see `retyped_moments`.

    Raises:
        InputError: it is no checkpoint, or that of another model, or damaged.
    """
    progress = read_progress(checkpoint)
    reader = CheckpointReader(checkpoint)
    for unit in engine.sharding.units:
        unit.own()
    _check_model(reader.tensors(), engine.spec, checkpoint)
    try:
        with _quiet():
            load(
                _tensors_of(engine),
                storage_reader=reader,
                planner=SlicesLoadPlanner(),
                no_dist=engine.groups.world.size == 1,
            )
    except CheckpointException as error:
        raise InputError(Problem("resume", checkpoint, f"is a damaged checkpoint ({_cause(error)})")) from None
    for _, moments in engine.optimizer.states():
        moments["step"].fill_(progress.step if progress.updates is None else progress.updates)
    engine.sharding.publish()
    _restore_random(checkpoint, engine)
    return progress


def retyped_moments(checkpoint: str | Path, engine: Engine) -> str | None:
    """What becomes of the moments of `checkpoint` where it stores them in another type than the run; None if alike.

    Every bfloat16 is a float32, and of a float32 the nearest bfloat16 is taken: what a step of the run would leave.
    """
    ours = engine.optimizer.config.moments
    tables = CheckpointReader(checkpoint).tensors()
    kinds = {
        str(table.properties.dtype).removeprefix("torch.")
        for name, table in tables.items()
        if name.startswith(tuple(f"{kind}." for kind in KINDS[1:]))
    }
    if kinds == {ours}:
        return None
    return f"{', '.join(sorted(kinds))} in the checkpoint, {'widened' if ours == 'float32' else 'rounded'} to {ours}"


def _restore_random(checkpoint: str | Path, engine: Engine) -> None:
    """Give each rank its generators' states, if there are as many ranks as there were."""
    try:
        states = json.loads(read_bytes(*locate(checkpoint), RANDOM_FILE, _RANDOM_LIMIT_BYTES))
        if len(states) == engine.groups.world.size:
            restore_random_states(states[engine.groups.rank], engine.groups.device)
    except (DamagedCheckpoint, ValueError, TypeError, RecursionError) as error:
        rule = f"is a damaged checkpoint ({RANDOM_FILE}: {error})"
        raise InputError(Problem("resume", checkpoint, rule)) from None


def _check_model(saved: Mapping[str, TensorStorageMetadata], spec: ModelSpec, checkpoint: str | Path) -> None:
    """Refuse the checkpoint of another model: one that is larger would be loaded in part."""
    there = {name: list(table.size) for name, table in saved.items()}
    here = {f"{kind}.{tensor.name}": list(tensor.shape) for kind in KINDS for tensor in spec.tensors()}
    for name in (*here, *there):
        if there.get(name) != here.get(name):
            sizes = f"{there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
            rule = f"holds another model: {name} is {sizes}"
            raise InputError(Problem("resume", checkpoint, rule))


def _cause(error: CheckpointException) -> str:
    """What the first rank that failed says."""
    failure, _ = next(iter(error.failures.values()))
    return str(failure) or type(failure).__name__


def _tensors_of(engine: Engine, copy: HostCopy | None = None) -> dict[str, Slices]:
    """Master weights and both moments under Hugging Face names, as this rank holds them, or copies."""
    states = list(engine.optimizer.states())
    flats = [flat for part, moments in states for flat in (part.parameter.data, *(moments[kind] for kind in KINDS[1:]))]
    held = iter(flats if copy is None else copy.take(flats))
    found: dict[str, tuple[tuple[int, ...], list[Rectangle]]] = {}
    for part, _ in states:
        for kind in KINDS:
            for name, shape, rectangle in _rectangles_of(part, next(held)):
                found.setdefault(f"{kind}.{name}", (shape, []))[1].append(rectangle)
    return {key: Slices(shape, parts) for key, (shape, parts) in found.items()}


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
    """Silence torch's warning that a single process loads; that is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield

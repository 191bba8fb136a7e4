"""Where a run goes on: the newest checkpoint that is whole, chosen by one rank, read by all before it is used."""

from __future__ import annotations

from dataclasses import dataclass, field

from triweave.checkpoint.agreement import from_first
from triweave.checkpoint.damaged import damage
from triweave.checkpoint.kept import found
from triweave.checkpoint.owner import Owner, writer_of
from triweave.checkpoint.places import locate
from triweave.checkpoint.store import Store
from triweave.config.validate import ResolvedRun
from triweave.data.cache import PreparedData
from triweave.errors import InputError, Problem, RunFailed
from triweave.groups import Group
from triweave.training.checkpoints import load_checkpoint, retyped_moments
from triweave.training.engine import Engine
from triweave.training.resume_check import check_same_run, none_is_whole, store_of
from triweave.training.run_progress import RunProgress


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run has found itself."""

    progress: RunProgress | None = None
    """None: at its beginning."""
    moments: str | None = None
    """On the first rank: what was done to the checkpoint's moments, if they were of another type."""
    bad: dict[str, str] = field(default_factory=dict)
    """Newer checkpoints that were passed over, and what is wrong with each."""


def clean_up(store: Store) -> None:
    """Remove what a save that was stopped in the middle has left. For the holder of the run's lock, before a save.

    Raises:
        RunFailed: the store refuses.
    """
    try:
        store.sweep()
    except OSError as error:
        raise RunFailed(f"cannot tidy {store.where}: {error.strerror or error}") from None


def resume(
    resolved: ResolvedRun, prepared: PreparedData, engine: Engine, group: Group, owner: Owner | None = None
) -> Resumed:
    """Load the checkpoint that the run file asks for. All ranks of `group` call it together.

    Every byte of a checkpoint is read and compared before any of it is used. With `resume: auto` a damaged one is
    passed over for the one before, and so is another run's (`owner` says on rank 0 who this one is).

    Raises:
        InputError: the one that was asked for is damaged, or there are checkpoints and none of them is whole.
    """
    run, store = resolved.run, store_of(resolved.run)
    if run.resume == "never":
        return Resumed()
    if run.resume != "auto":
        problem = damage(*locate(run.resume), group)
        if problem is not None:
            raise InputError(Problem("resume", run.resume, f"is a damaged checkpoint ({problem})", "auto"))
        return _loaded(run.resume, engine, group, {})
    bad: dict[str, str] = {}
    # One rank lists and all follow: two hosts may see a shared disk differently.
    listed = [(name, _is_foreign(store, name, owner)) for name in found(store)] if group.rank == 0 else None
    for name, is_foreign in from_first(listed, group):
        problem = "is of another run" if is_foreign else damage(store, name, group)
        if problem is None:
            source = f"{store.where}/{name}"
            check_same_run(source, resolved, prepared)
            return _loaded(source, engine, group, bad)
        bad[name] = problem
    if bad:
        raise none_is_whole(store, bad)
    return Resumed()


def _loaded(source: str, engine: Engine, group: Group, bad: dict[str, str]) -> Resumed:
    progress = load_checkpoint(source, engine)
    # One rank says it; the table of contents need not be read by all once more.
    return Resumed(progress, retyped_moments(source, engine) if group.rank == 0 else None, bad)


def _is_foreign(store: Store, name: str, owner: Owner | None) -> bool:
    return owner is not None and not owner.owns(writer_of(store, name))

"""Where a run goes on: the newest checkpoint that is whole, chosen by one rank, read by all before it is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from triweave.checkpoint.agreement import from_first
from triweave.checkpoint.kept import damage, damage_at_a_glance, found
from triweave.checkpoint.owner import Owner, writer_of
from triweave.checkpoint.places import locate, open_store
from triweave.checkpoint.store import Store
from triweave.config.schema import Run
from triweave.config.validate import ResolvedRun
from triweave.data.cache import PreparedData
from triweave.errors import InputError, Problem, RunFailed
from triweave.groups import Group
from triweave.training.checkpoints import RunProgress, load_checkpoint, read_progress
from triweave.training.engine import Engine


@dataclass(slots=True)
class Resumed:
    """Where a run has found itself."""

    progress: RunProgress | None = None
    """None: at its beginning."""
    bad: dict[str, str] = field(default_factory=dict)
    """Newer checkpoints that were passed over, and what is wrong with each."""


def store_of(run: Run) -> Store:
    """Where the checkpoints of a run lie."""
    return open_store(run.checkpoint.path or Path(run.output_dir) / "checkpoints")


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
        return Resumed(load_checkpoint(run.resume, engine))
    resumed = Resumed()
    # One rank lists and all follow: two hosts may see a shared disk differently.
    listed = [(name, _is_foreign(store, name, owner)) for name in found(store)] if group.rank == 0 else None
    for name, is_foreign in from_first(listed, group):
        problem = "is of another run" if is_foreign else damage(store, name, group)
        if problem is None:
            source = f"{store.where}/{name}"
            check_same_run(source, resolved, prepared)
            resumed.progress = load_checkpoint(source, engine)
            return resumed
        resumed.bad[name] = problem
    if resumed.bad:
        raise _none_is_whole(store, resumed.bad)
    return resumed


def check_resume(resolved: ResolvedRun, prepared: PreparedData) -> None:
    """Check the checkpoint that the run goes on from, if it does; one process does this before the ranks meet.

    Raises:
        InputError: it is none, or not one of this run, or the run would write below checkpoints that go further.
    """
    run = resolved.run
    store = store_of(run)
    try:
        damages = {name: damage_at_a_glance(store, name) for name in found(store)}
    except OSError as error:
        key = "output_dir" if run.checkpoint.path is None else "checkpoint.path"
        raise InputError(Problem(key, store.where, f"cannot be read ({error.strerror or error})")) from None
    whole = [name for name, problem in damages.items() if problem is None]
    source = None
    if run.resume == "auto":
        if damages and not whole:
            raise _none_is_whole(store, {name: str(problem) for name, problem in damages.items()})
        source = f"{store.where}/{whole[0]}" if whole else None
    elif run.resume != "never":
        source = run.resume
        if (problem := damage_at_a_glance(*locate(source))) is not None:
            raise InputError(Problem("resume", source, f"is no checkpoint: {problem}", "auto, never"))
    if source is not None:
        check_same_run(source, resolved, prepared)
    begin = 0 if source is None else read_progress(source).step
    if whole and read_progress(f"{store.where}/{whole[0]}").step > begin:
        # They would be taken for the newest of this run: kept in place of its own, and resumed from.
        rule = f"holds {whole[0]} of an earlier run, and this one starts from step {begin}"
        raise InputError(Problem("output_dir", run.output_dir, rule, "another folder, or resume: auto"))


def check_same_run(source: str, resolved: ResolvedRun, prepared: PreparedData) -> None:
    """Refuse to go on with other data, another seed or another global batch: samples would be lost or repeated.

    Raises:
        InputError: one of the three differs from what the checkpoint was trained with.
    """
    progress, run = read_progress(source), resolved.run
    if progress.step == 0:
        return  # nothing was trained yet, on any data
    pairs = [
        ("seed", run.seed, progress.seed),
        ("train.global_batch", run.train.global_batch, progress.global_batch),
    ]
    problems = [
        Problem(key, now, f"differs from the {then} of the checkpoint {source}", str(then))
        for key, now, then in pairs
        if now != then
    ]
    # Another seed holds out other examples: then the data differ, and not by a mistake of their own.
    if prepared.summary.fingerprint != progress.data and run.seed == progress.seed:
        rule = f"gives other training sequences than those of the checkpoint {source}"
        problems.append(
            Problem("data.train", ", ".join(run.data.train), rule, "the former data, or another output_dir")
        )
    if problems:
        raise InputError(problems)


def _is_foreign(store: Store, name: str, owner: Owner | None) -> bool:
    return owner is not None and not owner.owns(writer_of(store, name))


def _none_is_whole(store: Store, damages: dict[str, str]) -> InputError:
    told = "; ".join(f"{name}: {problem}" for name, problem in damages.items())
    rule = f"finds no whole checkpoint among the {len(damages)} in {store.where} ({told})"
    return InputError(Problem("resume", "auto", rule, "another output_dir to begin anew, or a copy of a whole one"))

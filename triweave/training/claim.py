"""What rank 0 does before the ranks meet: it takes the run's places, sees whose they are, and writes the start down."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from triweave.checkpoint.kept import found, step_of
from triweave.checkpoint.owner import Owner, new_owner, read_owner, write_owner, writer_of
from triweave.checkpoint.places import locate
from triweave.checkpoint.run_lock import claimed
from triweave.checkpoint.store import Store
from triweave.config.schema import Run
from triweave.errors import InputError, Problem
from triweave.recovery.agreement import digest_of
from triweave.recovery.starts import begin
from triweave.run_folder import STOPPED_FILE
from triweave.training.resume_check import store_of


@contextmanager
def claimed_run(run: Run, facts: Mapping[str, str]) -> Iterator[Owner]:
    """Hold the folder of a run and that of its checkpoints while the block runs; gives who the run is.

    Args:
        run: the run file.
        facts: all that ranks must agree on.

    Raises:
        InputError: another job holds either, or the checkpoints are another run's.
        GivenUp: the run was started so often without a new step that this start is refused.
    """
    folder = Path(run.output_dir)
    tell = functools.partial(print, file=sys.stderr)
    with ExitStack() as held:
        held.enter_context(claimed(folder, tell))
        # Whoever asks it must not hear of an earlier stop when this start fails.
        (folder / STOPPED_FILE).unlink(missing_ok=True)
        store = store_of(run)
        former = read_owner(folder)
        owner = former or new_owner()
        key = "output_dir" if run.checkpoint.path is None else "checkpoint.path"
        if Path(store.where).resolve() != folder.resolve():
            # Another output_dir may name the same place.
            held.enter_context(store.held(owner.run, key, tell))
        names = _names(key, store)
        owner = _owner(run, store, owner, names)
        newest = step_of(names[0]) if names else None
        try:
            if owner != former:
                write_owner(folder, owner)
            begin(folder, digest_of(facts), newest or 0, run.runtime.max_starts_without_step)
        except OSError as error:
            raise InputError(Problem("output_dir", folder, f"cannot be written to ({error.strerror})")) from None
        yield owner


def _names(key: str, store: Store) -> list[str]:
    try:
        return found(store)
    except OSError as error:
        raise InputError(Problem(key, store.where, f"cannot be read ({error.strerror or error})")) from None


def _owner(run: Run, store: Store, owner: Owner, names: list[str]) -> Owner:
    """Who the run is, once it is sure that the checkpoints there are its own.

    Raises:
        InputError: they are another run's, and the run file does not name one of them to go on from.
    """
    writer = writer_of(store, names[0]) if names else ""
    if run.resume not in ("auto", "never"):
        source, name = locate(run.resume)
        if name in names and source.where == store.where:
            owner = owner.taking_over(writer_of(store, name))
    elif run.checkpoint.path is None:
        # They lie in the run's own folder: who copied or moved them there meant it.
        owner = owner.taking_over(writer)
    if not owner.owns(writer):
        rule = f"holds {names[0]} of another run than that of {run.output_dir}"
        nearest = f"another place, or resume: {store.where}/{names[0]} once, to take it over"
        raise InputError(Problem("checkpoint.path", store.where, rule, nearest))
    return owner

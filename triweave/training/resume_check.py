"""Whether a run may go on from where it means to, found before its ranks meet, by a process that does no training.

What loads a checkpoint is not imported here: it takes longer than all other imports of that process but torch.
"""

from __future__ import annotations

from pathlib import Path

from triweave.checkpoint.kept import damage_at_a_glance, found
from triweave.checkpoint.places import locate, open_store
from triweave.checkpoint.store import Store
from triweave.config.schema import Run
from triweave.config.validate import ResolvedRun
from triweave.data.cache import PreparedData
from triweave.errors import InputError, Problem
from triweave.training.run_progress import read_progress


def store_of(run: Run) -> Store:
    """Where the checkpoints of a run lie."""
    return open_store(run.checkpoint.path or Path(run.output_dir) / "checkpoints")


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
            raise none_is_whole(store, {name: str(problem) for name, problem in damages.items()})
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


def none_is_whole(store: Store, damages: dict[str, str]) -> InputError:
    """What is said where there are checkpoints and none of them is to be used."""
    told = "; ".join(f"{name}: {problem}" for name, problem in damages.items())
    rule = f"finds no whole checkpoint among the {len(damages)} in {store.where} ({told})"
    return InputError(Problem("resume", "auto", rule, "another output_dir to begin anew, or a copy of a whole one"))

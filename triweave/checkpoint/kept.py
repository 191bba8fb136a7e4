"""Which checkpoints a store has, which of them can be believed, and which may go."""

from __future__ import annotations

import re
from collections.abc import Collection

from triweave.checkpoint.manifest import check_sizes, read_manifest
from triweave.checkpoint.store import DamagedCheckpoint, Store

_STEP = re.compile(r"step-(0|[1-9]\d*)")


def name_of(step: int) -> str:
    """The folder of the checkpoint after `step` steps."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def found(store: Store) -> list[str]:
    """Names of the checkpoints, whole or not, newest first.

    Raises:
        OSError: the store cannot be listed.
    """
    names = set(store.names())
    hint = store.hint()
    # A listing may lag behind, on a shared disk or in an object store.
    if hint is not None and step_of(hint) is not None and hint not in names and _is_there(store, hint):
        names.add(hint)
    steps = {step for name in names if (step := step_of(name)) is not None}
    return [name_of(step) for step in sorted(steps, reverse=True)]


def damage_at_a_glance(store: Store, name: str) -> str | None:
    """What is wrong with a checkpoint as far as its manifest and the sizes of its files tell; None if nothing is."""
    try:
        check_sizes(store, name, read_manifest(store, name))
    except DamagedCheckpoint as damage:
        return str(damage)
    return None


def retire(store: Store, keep: int, bad: Collection[str] = ()) -> list[str]:
    """Delete all but the newest `keep` whole checkpoints, and what is older than they; returns the names.

    What is damaged does not count, and goes only once it is older than all that are kept. Called when a save is
    complete and none is under way.

    Args:
        store: of one run.
        keep: at least 1.
        bad: names that were read and found damaged, whatever their sizes say.

    Raises:
        OSError: the store refuses.
    """
    names = found(store)
    whole = [name for name in names if name not in bad and damage_at_a_glance(store, name) is None]
    if not whole:
        return []
    oldest_kept = names.index(whole[:keep][-1])
    gone = names[oldest_kept + 1 :]
    for name in gone:
        store.delete(name)
    return gone


def _is_there(store: Store, name: str) -> bool:
    try:
        return bool(store.sizes(name))
    except OSError:
        return False

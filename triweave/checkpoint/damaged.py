"""Whether a checkpoint is damaged, every byte of it read: the ranks share its files, and agree on the answer."""

from __future__ import annotations

from triweave.checkpoint.agreement import gather
from triweave.checkpoint.manifest import check_file, check_sizes, read_manifest, share_of
from triweave.checkpoint.store import DamagedCheckpoint, Store
from triweave.groups import Group


def damage(store: Store, name: str, group: Group) -> str | None:
    """What is wrong with a checkpoint, every byte of it read; None if nothing is.

    All ranks of `group` call it together. Each reads its share of the files, and all get the same answer.
    """
    problem = None
    try:
        manifest = read_manifest(store, name)
        check_sizes(store, name, manifest)
        for file in share_of(manifest, group.rank, group.size):
            check_file(store, name, file, manifest.files[file])
    except DamagedCheckpoint as damage:
        problem = str(damage)
    return next((said for said in gather(problem, group) if said is not None), None)

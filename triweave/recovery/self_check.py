"""Every process group tried once before the first step: a group that does not work is named then, and not in a hang."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from triweave.errors import RunFailed
from triweave.groups import Group, Groups
from triweave.recovery.out_of_memory import is_out_of_memory

LIMIT_S = 60.0
"""For one operation. NCCL connects in the first one, which takes seconds where there are thousands of ranks."""
_LOOK_S = 1e-3
_ASK_S = 0.2
"""Between two questions whether another rank has failed already."""
_FAILED = "self-check/failed"

_OF_OTHERS = re.compile(r"time[d-]?\s?out|[Cc]onnect|wait\(|store", re.IGNORECASE)
"""Errors of gloo, NCCL and the store that another rank may be the cause of."""


@contextmanager
def together(store: Store | None, what: str, rank: int, world_size: int) -> Iterator[None]:
    """Say which ranks were missing, when what all ranks do together in the block fails for want of them.

    Raises:
        RunFailed: it does.
    """
    if store is None:
        yield
        return
    store.set(f"{what}/{rank}", "")
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) or not _OF_OTHERS.search(str(error)):
            raise
        reason = str(error).splitlines()[0]
        missing = [str(other) for other in range(world_size) if not store.check([f"{what}/{other}"])]
        who = f"rank {', '.join(missing)} has not come to it" if missing else "all ranks have come to it"
        raise RunFailed(f"rank {rank}: {what} failed; {who}: {reason}") from error


def named_groups(groups: Groups) -> Iterator[tuple[str, Group]]:
    """The groups of a rank that hold others too, in the order of all ranks."""
    layout = groups.layout
    if layout.uses_shard_groups:
        reductions = {"shards": groups.shards, "across": groups.across}
    else:
        reductions = {"dp" if layout.cp == 1 else "dp x cp": groups.shards}
    fixed = {
        "world": groups.world,
        "tp": groups.tp,
        "cp": groups.cp,
        **reductions,
        "kv": groups.kv,
        "tied": groups.tied,
    }
    yield from ((name, group) for name, group in fixed.items() if group.size > 1)
    yield from (("pipeline", groups.channels[channel]) for channel in sorted(groups.channels))


def check_groups(groups: Groups, store: Store | None, limit_s: float = LIMIT_S) -> int:
    """Sum, or pass on, a number over every group of this rank; all ranks call it together. Returns how many groups.

    Raises:
        RunFailed: an operation has not ended in time, has failed, or gave another number; names it and the ranks.
    """
    count = 0
    for number, (name, group) in enumerate(named_groups(groups)):
        operation = "send" if name == "pipeline" else "all_reduce"
        what = f"{operation} on the {name} group of ranks {', '.join(map(str, group.ranks))}"
        key = f"self-check/{name}/{'-'.join(map(str, group.ranks))}/{number if name == 'pipeline' else 0}"
        if store is not None:
            store.set(f"{key}/{groups.rank}", "")
        token = torch.full((1,), float(groups.rank + 1), device=groups.device)
        try:
            work = _start(token, name, group)
            _wait(work, store, limit_s, by_itself=name == "pipeline" and groups.device.type == "cpu")
        except (RuntimeError, TimeoutError) as error:
            missing = [str(rank) for rank in group.ranks if store is not None and not store.check([f"{key}/{rank}"])]
            who = f"rank {', '.join(missing)} has not come to it" if missing else "all of them have come to it"
            _fail(store, f"rank {groups.rank}: {what} failed; {who}: {str(error).splitlines()[0]}")
        due = float(group.ranks[0] + 1 if name == "pipeline" else sum(rank + 1 for rank in group.ranks))
        if token.item() != due:
            _fail(store, f"rank {groups.rank}: {what} gave {token.item():g}, and {due:g} is right")
        count += 1
    return count


def _start(token: torch.Tensor, name: str, group: Group) -> dist.Work | None:
    if name != "pipeline":
        work: dist.Work | None = dist.all_reduce(token, group=group.handle, async_op=True)
        return work
    # What training does on it: a collective would make NCCL connect once more.
    source, destination = group.ranks
    if group.rank == 0:
        return dist.isend(token, destination, group=group.handle)
    return dist.irecv(token, source, group=group.handle)


def _wait(work: dist.Work | None, store: Store | None, limit_s: float, *, by_itself: bool) -> None:
    """Until the work is done, another rank has failed, or the time is over.

    gloo's messages are only done once they are waited for (`by_itself`): asked, they say no for ever.
    """
    if work is None:
        return
    if by_itself:
        work.wait(timedelta(seconds=limit_s))
        return
    begin = asked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now - begin > limit_s:
            raise TimeoutError(f"it has not ended within {limit_s:g} s")
        if store is not None and now - asked > _ASK_S:
            asked = now
            if store.check([_FAILED]):
                raise RunFailed(store.get(_FAILED).decode())
        time.sleep(_LOOK_S)
    work.wait()


def _fail(store: Store | None, message: str) -> None:
    if store is not None:
        store.set(_FAILED, message)
    raise RunFailed(message)

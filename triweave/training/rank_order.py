"""Whether the ranks that a launcher started sit on the hosts that the plan means: what they tell each other first."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch._C._distributed_c10d import Store

from triweave.config.validate import ResolvedRun
from triweave.errors import RunFailed, TriweaveError
from triweave.launch.placement import misplaced
from triweave.launch.variables import NODE_RANK
from triweave.recovery.agreement import agree, exchange, refuse
from triweave.training.process import GRACE_S, Process
from triweave.training.processes import meet

WHAT = "hosts"
"""The exchange."""


def check_rank_order(meeting: Store | None, process: Process, resolved: ResolvedRun) -> None:
    """Compare host and node of every rank with the layout; all ranks call it together, before a process group is made.

    Raises:
        RunFailed: ranks of one node of the plan are on several hosts, or nodes are not in the launch file's order; the
            message shows both maps side by side.
    """
    # Ranks that `train` has started itself are on one host.
    if meeting is None or process.store_port is not None:
        return
    timeout_s = resolved.run.runtime.timeout_s
    given = os.environ.get(NODE_RANK, "")
    mine = json.dumps([socket.gethostname(), int(given) if given.isdecimal() else None])
    told = [json.loads(text) for text in exchange(meeting, WHAT, process.rank, process.world_size, mine, timeout_s)]
    shown: list[str] = []
    if process.rank == 0:
        per_node = resolved.cluster.gpus_per_node if resolved.cluster is not None else resolved.gpus_per_node
        shown = misplaced(resolved.layout, per_node, [host for host, _ in told], [node for _, node in told])
    agree(meeting, WHAT, process.rank, shown, timeout_s, "the ranks are not where the plan has them")


@contextmanager
def refusing_for_all(process: Process) -> Iterator[None]:
    """Where rank 0 fails in the block, before it has met the others, let them know: they wait for it.

    Their launcher asks them to end, which they take for a stop of the whole run, and wait for rank 0 to stop with:
    torchrun kills them 30 s later. Does nothing for ranks without a launcher, which hear it from who started them, nor
    where rank 0 keeps the store, which goes with it.
    """
    try:
        yield
    except TriweaveError as error:
        if process.store_port is None and not process.rank_0_keeps_store:
            with suppress(RunFailed):
                if (store := meet(process, GRACE_S)) is not None:
                    refuse(store, WHAT, str(error))
        raise

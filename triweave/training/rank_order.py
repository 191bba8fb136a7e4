"""Whether the ranks that a launcher started sit on the hosts that the plan means, asked once before they begin."""

from __future__ import annotations

import json
import os
import socket

from torch._C._distributed_c10d import Store

from triweave.config.validate import ResolvedRun
from triweave.launch.placement import misplaced
from triweave.launch.variables import NODE_RANK
from triweave.recovery.agreement import agree, exchange
from triweave.training.process import Process


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
    told = [json.loads(text) for text in exchange(meeting, "hosts", process.rank, process.world_size, mine, timeout_s)]
    shown: list[str] = []
    if process.rank == 0:
        per_node = resolved.cluster.gpus_per_node if resolved.cluster is not None else resolved.gpus_per_node
        shown = misplaced(resolved.layout, per_node, [host for host, _ in told], [node for _, node in told])
    agree(meeting, "hosts", process.rank, shown, timeout_s, "the ranks are not where the plan has them")

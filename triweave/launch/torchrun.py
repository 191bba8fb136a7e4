"""torchrun: one script, to be started on every node."""

from __future__ import annotations

import shlex

from triweave.config.validate import ResolvedRun
from triweave.launch.job import Job, Settings, make_job
from triweave.launch.shell import Node, comment, node_script


def files(resolved: ResolvedRun, settings: Settings) -> dict[str, str]:
    """The script, by its name.

    Raises:
        InputError: as `make_job`.
    """
    job = make_job(resolved, settings)
    head = comment(f"Start it on every node, with its number from 0 and the host of node 0: {_start(job, '$i')}")
    if job.num_nodes == 1:
        head = comment("Start it on the node.")
    node = Node(head=head, restarts=settings.restarts)
    return {f"{job.name}.sh": node_script(resolved, job, settings.python, node)}


def command(resolved: ResolvedRun, settings: Settings, folder: str) -> str:
    """What starts node 0."""
    job = make_job(resolved, settings)
    return _start(job, "0", folder)


def _start(job: Job, number: str, folder: str = ".") -> str:
    script = f"bash {shlex.quote(f'{folder}/{job.name}.sh')}"
    return f"NODE_RANK={number} MASTER_ADDR=HOST_OF_NODE_0 {script}" if job.num_nodes > 1 else script

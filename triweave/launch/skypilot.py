"""SkyPilot: one task."""

from __future__ import annotations

import re
import shlex
from typing import Any

from triweave.config.document import to_yaml
from triweave.config.validate import ResolvedRun
from triweave.errors import InputError, Problem
from triweave.launch.job import Settings, make_job
from triweave.launch.shell import Node, comment, node_script, summary
from triweave.launch.yaml_text import dump

ACCELERATORS = {
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "h100-80gb": "H100",
    "h200-141gb": "H200",
    "b200-180gb": "B200",
    "gb200-186gb": "GB200",
}
STOPPED = 75
RUN_FILE = "triweave-run.yaml"
END = "END_OF_RUN_FILE"


def files(resolved: ResolvedRun, settings: Settings) -> dict[str, str]:
    """The task, by its name.

    Raises:
        InputError: as `make_job`; a GPU that SkyPilot has no name for, a name that it refuses.
    """
    job = make_job(resolved, settings)
    problems = []
    if not re.fullmatch(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", job.name):
        plain = re.sub(r"[^a-zA-Z0-9]+", "-", job.name).strip("-")
        rule = "must be letters, digits and single . _ - between them"
        problems.append(Problem("--name", repr(job.name), rule, plain or "run"))
    if job.gpu is not None and job.gpu not in ACCELERATORS:
        rule = f"is no GPU that SkyPilot has a name for here; it has {', '.join(ACCELERATORS)}"
        problems.append(Problem("cluster", str(resolved.cluster), rule))
    if problems:
        raise InputError(problems)
    resources: dict[str, Any] = {}
    if job.gpu is not None:
        resources["accelerators"] = f"{ACCELERATORS[job.gpu]}:{job.gpus_per_node}"
    if settings.image is not None:
        resources["image_id"] = f"docker:{settings.image}"
    # 75: stopped on request with everything saved, which counts as no error.
    resources["job_recovery"] = {"max_restarts_on_errors": settings.restarts, "recover_on_exit_codes": [STOPPED]}
    task = {
        "name": job.name,
        "resources": resources,
        "num_nodes": job.num_nodes,
        "setup": f"{shlex.quote(settings.python)} -c 'import triweave'\n",
        "run": _run(resolved, settings),
    }
    head = [
        *summary(resolved, job),
        *comment(
            f"A shared disk at {job.workdir} holds model, data and checkpoints: file_mounts and volumes are yours."
        ),
    ]
    return {f"{job.name}.sky.yaml": dump(task, head=head)}


def command(resolved: ResolvedRun, settings: Settings, folder: str) -> str:
    """What submits it as a job that is started again when its machines are taken away."""
    job = make_job(resolved, settings)
    return f"sky jobs launch {shlex.quote(f'{folder}/{job.name}.sky.yaml')}"


def _run(resolved: ResolvedRun, settings: Settings) -> str:
    """The script of a node, which brings its run file along: the nodes share no folder with where this was written."""
    text = to_yaml(resolved.run)
    end = END
    while end in text.splitlines():
        end += "_"
    write = [f"cat > \"$HOME/{RUN_FILE}\" <<'{end}'", *text.splitlines(), end]
    node = Node(before=write, words=f'train "$HOME/{RUN_FILE}"')
    script = node_script(resolved, make_job(resolved, settings), settings.python, node)
    return "\n".join(
        [
            "NODE_RANK=$SKYPILOT_NODE_RANK",
            'MASTER_ADDR=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")',
            script.removeprefix("#!/bin/bash\n"),
        ]
    )

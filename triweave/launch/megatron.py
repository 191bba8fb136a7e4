"""Megatron-LM: a script with the same plan, to be started on every node."""

from __future__ import annotations

import shlex

from triweave.config.validate import ResolvedRun
from triweave.launch.job import Job, Settings, make_job
from triweave.launch.megatron_arguments import SHELL_VALUES, Argument, export
from triweave.launch.shell import LEFT_TO_THE_SITE, comment, exports, summary, torchrun
from triweave.launch.variables import Variable
from triweave.layout import Layout

VERSION = "0.19.2"
"""Of Megatron-Core, whose arguments these are."""


def files(resolved: ResolvedRun, settings: Settings) -> dict[str, str]:
    """The script, by its name.

    Raises:
        InputError: as `make_job`, and as `export`.
    """
    job = make_job(resolved, settings)
    return {f"{job.name}.megatron.sh": _script(resolved, settings, job)}


def command(resolved: ResolvedRun, settings: Settings, folder: str) -> str:
    """What starts node 0."""
    job = make_job(resolved, settings)
    where = "NODE_RANK=0 MASTER_ADDR=HOST_OF_NODE_0 " if job.num_nodes > 1 else ""
    return f"{where}bash {shlex.quote(f'{folder}/{job.name}.megatron.sh')}"


def max_connections(layout: Layout, gpu: str) -> Variable | None:
    """CUDA_DEVICE_MAX_CONNECTIONS where Megatron asserts it: TP or CP on a GPU before Blackwell, without FSDP.

    With one connection kernels start in the order in which they were launched, so that communication is under way
    before the product that hides it. Its FSDP must have more than one.
    """
    fsdp = layout.replicas > 1 and layout.shard in ("gradients", "full")
    if fsdp or (layout.tp == 1 and layout.cp == 1) or gpu.startswith(("b200", "gb200")):
        return None
    axis = "tensor" if layout.tp > 1 else "context"
    reason = f"Kernels start in launch order, so {axis}-parallel communication before what hides it; Megatron insists."
    return Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", reason)


def _script(resolved: ResolvedRun, settings: Settings, job: Job) -> str:
    exported = export(resolved, job.cluster)
    connections = max_connections(resolved.layout, job.cluster.gpu.name)
    told = [
        Variable(
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "Joins freed pages, so that memory is not lost in pieces.",
        ),
        *([connections] if connections else []),
        Variable("NCCL_DEBUG", "WARN", "NCCL says why it fails; INFO would add a page a rank."),
    ]
    several = job.num_nodes > 1
    arrays = [
        line
        for group in exported.groups
        for line in (f"{group.title}=(", *(f"  {_shown(argument)}" for argument in group.arguments), ")")
    ]
    names = " ".join(f'"${{{group.title}[@]}}"' for group in exported.groups)
    needed = {
        "MEGATRON_LM": "folder of a Megatron-LM checkout, with pretrain_gpt.py",
        "DATA_PREFIX": "prefix of the .bin and .idx that its tools/preprocess_data.py made",
        "START_CHECKPOINT": "weights to begin with: triweave convert MODEL FOLDER --to megatron",
        "TRAIN_STEPS": "steps of the run: the run file gives epochs, which Megatron does not count",
    }
    if resolved.run.train.steps is not None:
        del needed["TRAIN_STEPS"]
    return "\n".join(
        [
            "#!/bin/bash",
            *comment(
                f"Megatron-LM (Megatron-Core {VERSION}) with the layout of {settings.run_file}. Start it on every node,"
                " with NODE_RANK from 0 and MASTER_ADDR, the host of node 0."
                if several
                else f"Megatron-LM (Megatron-Core {VERSION}) with the layout of {settings.run_file}."
            ),
            "#",
            *summary(resolved, job),
            "#",
            *comment("Left out:"),
            *(line for why in exported.left_out for line in comment(f"- {why}")),
            "set -euo pipefail",
            "",
            "node_rank=" + ("${NODE_RANK:?is the number of this node, from 0}" if several else "${NODE_RANK:-0}"),
            "master=" + ("${MASTER_ADDR:?is the host of node 0}" if several else "${MASTER_ADDR:-127.0.0.1}"),
            "port=${MASTER_PORT:-29500}",
            *(f': "${{{name}:?{what}}}"' for name, what in needed.items()),
            f"SAVE_FOLDER=${{SAVE_FOLDER:-{shlex.quote(job.output_dir + '/megatron')}}}",
            "",
            *exports(told),
            *comment(LEFT_TO_THE_SITE),
            "",
            *arrays,
            "",
            f"cd -- {shlex.quote(job.workdir)}",
            f"exec {shlex.quote(settings.python)} {torchrun(job)} \\",
            '  --node-rank="$node_rank" --master-addr="$master" --master-port="$port" \\',
            f'  "$MEGATRON_LM/pretrain_gpt.py" {names}',
            "",
        ]
    )


def _shown(argument: Argument) -> str:
    """An argument as bash reads it; values that are the script's own variables stay open."""
    values = [f'"{value}"' if value in SHELL_VALUES else shlex.quote(value) for value in argument.values]
    return " ".join([argument.name, *values])

"""Pieces of bash that several engines share."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triweave.config.validate import ResolvedRun
from triweave.launch.job import Job
from triweave.launch.placement import node_map
from triweave.launch.variables import NODE_RANK, Variable, variables

WIDTH = 118
AGAIN_S = 5
"""Seconds between two requests to stop."""
LEFT_TO_THE_SITE = (
    "Left to the site: NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME. What is set before this, stays."
)


def comment(*paragraphs: str) -> list[str]:
    """Paragraphs as comment lines."""
    return [
        line for text in paragraphs for line in textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")
    ]


def exports(told: Iterable[Variable]) -> list[str]:
    """`export NAME=VALUE`, the reason above it; a variable that the site has set before stays as it is."""
    lines = []
    for one in told:
        lines += [*comment(one.reason), f"export {one.name}={shlex.quote(one.value)}"]
    return lines


def summary(resolved: ResolvedRun, job: Job) -> list[str]:
    """What runs where, as comment lines."""
    gpus = f"{job.gpus_per_node} {job.gpu or 'CPU ranks'}"
    head = (
        f"{resolved.layout} on {job.num_nodes} x {gpus}: {resolved.layout.world_size} ranks, a global batch of"
        f" {resolved.run.train.global_batch} in {resolved.num_micro_batches} micro-batches."
    )
    return [*comment(head), *(f"#   {line}" for line in node_map(resolved.layout, job.gpus_per_node))]


def torchrun(job: Job) -> str:
    """What makes the ranks of a node, to follow the interpreter; its place among the nodes is still to be given."""
    return f"-m torch.distributed.run --nnodes={job.num_nodes} --nproc-per-node={job.gpus_per_node}"


@dataclass(frozen=True, slots=True)
class Node:
    """What differs between engines in the script of a node."""

    head: Sequence[str] = ()
    """Comment lines that say how to use it."""
    before: Sequence[str] = ()
    """Lines to run first."""
    words: str | None = None
    """What triweave is told, as bash; None is what the job says."""
    restarts: int = 0
    """Starts after a crash that torchrun makes by itself: on one node, where its ranks meet anew."""
    join_s: int | None = None
    """In which all nodes must have come; None leaves it to torchrun."""
    stop_at_end_of_input: bool = False
    """Whether whoever holds the other end of its input may be killed, and the ranks are then to save and leave."""


def node_script(resolved: ResolvedRun, job: Job, python: str, node: Node) -> str:
    """A script that runs a node's ranks, to be started once on every node, whoever starts it.

    It takes NODE_RANK, MASTER_ADDR and MASTER_PORT from its environment. On SIGTERM or SIGUSR1 it asks the ranks, and
    not torchrun, to stop: torchrun would kill them 30 s later. It leaves with 75 when the run stopped with everything
    saved, and else with torchrun's own code.
    """
    several = job.num_nodes > 1
    rank = "${NODE_RANK:?is the number of this node, from 0}" if several else "${NODE_RANK:-0}"
    address = "${MASTER_ADDR:?is the host of node 0}" if several else "${MASTER_ADDR:-127.0.0.1}"
    options = [
        *([f"  --max-restarts={node.restarts} \\"] if node.restarts and not several else []),
        *([f"  --rdzv-conf=timeout={node.join_s} \\"] if node.join_s is not None else []),
    ]
    words = " ".join(shlex.quote(word) for word in job.words) if node.words is None else node.words
    watch = [
        *comment("Where this script is killed, the end of its input is seen by what it leaves behind."),
        # bash gives what runs in the background an empty input of its own, so that this one needs another number.
        "exec 3<&0",
        "(cat <&3 > /dev/null; ask_to_stop) &",
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *node.head,
            *(["#"] if node.head else []),
            *summary(resolved, job),
            "set -uo pipefail",
            "",
            *comment(
                "A stop goes to the ranks, whose parent is torchrun: it would kill them 30 s after a signal of its own."
                " Ranks that are not there yet, or have only begun, do not hear it: it is sent again and again."
            ),
            "asked=0",
            "ask_to_stop() {",
            "  local status process",
            "  asked=1",
            '  while kill -0 "${agent:-}" 2>/dev/null; do',
            '    for status in $(grep -ls "^PPid:[[:space:]]*$agent\\$" /proc/[0-9]*/status); do',
            "      process=${status%/status}",
            '      kill -USR1 "${process##*/}" 2>/dev/null',
            "    done",
            f"    sleep {AGAIN_S}",
            "  done",
            "}",
            "trap ask_to_stop TERM USR1",
            "",
            f"node_rank={rank}",
            f"master={address}",
            "port=${MASTER_PORT:-29500}",
            *comment("`train` compares this with where its ranks are, and refuses to begin if they are elsewhere."),
            f'export {NODE_RANK}="$node_rank"',
            "",
            *exports(variables(resolved, job)),
            *comment(LEFT_TO_THE_SITE),
            "",
            *node.before,
            f"cd -- {shlex.quote(job.workdir)} || exit 2",
            f"stopped={shlex.quote(job.stopped_file)}",
            *comment("Pinned buffers and InfiniBand want locked memory; where the hard limit is lower, it stays."),
            "ulimit -l unlimited 2>/dev/null || true",
            *comment("One node speaks for all: it removes what an earlier stop has left."),
            'if [ "$node_rank" = 0 ]; then rm -f -- "$stopped"; fi',
            "",
            *comment(
                "The rendezvous is static: with c10d torchrun ignores --node-rank and sorts nodes by name, as text."
            ),
            *comment("What does not listen yet ignores the signal of a stop, and does not die of it."),
            f'(trap "" USR1; exec {shlex.quote(python)} {torchrun(job)} \\',
            '  --node-rank="$node_rank" --master-addr="$master" --master-port="$port" \\',
            *options,
            f"  -m triweave {words} < /dev/null) &",
            "agent=$!",
            'if [ "$asked" = 1 ]; then ask_to_stop; fi',
            *(watch if node.stop_at_end_of_input else []),
            "",
            *comment("`wait` returns when a signal comes; the last one has the exit code."),
            'while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done',
            'wait "$agent"',
            "code=$?",
            *comment("torchrun leaves with 1 whatever the ranks say; the file says that they saved and may go on."),
            'if [ "$code" != 0 ] && [ -e "$stopped" ]; then exit 75; fi',
            'exit "$code"',
            "",
        ]
    )

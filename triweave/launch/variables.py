"""The environment of a run: every variable with the reason for it."""

from __future__ import annotations

from dataclasses import dataclass

from triweave.config.validate import ResolvedRun
from triweave.launch.job import Job

NODE_RANK = "TRIWEAVE_NODE_RANK"
"""The number that a launch file gives a node; `train` compares it with the ranks that came there."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of the environment."""

    name: str
    value: str
    reason: str


def variables(resolved: ResolvedRun, job: Job) -> tuple[Variable, ...]:
    """What a run wants of its environment; sites add what their network needs."""
    on_gpus = job.gpu is not None
    layout = resolved.layout
    told = [
        Variable("PYTHONUNBUFFERED", "1", "The log has a line when it is written, not when a buffer is full."),
        Variable(
            "OMP_NUM_THREADS", "1", "The ranks of a node share its cores; torchrun would set this too, with a warning."
        ),
    ]
    if on_gpus:
        told += [
            Variable(
                "PYTORCH_ALLOC_CONF",
                "expandable_segments:True",
                "Joins freed pages, so that memory is not lost in pieces; the plan counts on it.",
            ),
            Variable("NCCL_DEBUG", "WARN", "NCCL says why it fails; INFO would add a page a rank."),
        ]
    if on_gpus and layout.tp * layout.replicas > 1:
        told.append(
            Variable(
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "8",
                "CUDA's default, said aloud: with Megatron's 1, a stream that waits for a peer's copy would"
                " hold up all others.",
            )
        )
    if job.num_nodes > 1:
        told.append(
            Variable(
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
                "1",
                "With a site's c10d rendezvous, ranks started again must not read what dead ones left;"
                " the static one here is made anew with every start.",
            )
        )
    return tuple(told)

"""How every rank is timed and what it tells: the same for all systems."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from alone import NamedGroup
from workload import TIMED, WARM_UP, Case

from triweave.dryrun.lone_rank import lone_rank

GIB = 2**30


def rank() -> int:
    """This process among the ranks of the case."""
    return int(os.environ["RANK"])


def device() -> torch.device:
    """This rank's GPU, made current, or the CPU where there is none."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(where)
    return where


def time_steps(step: Callable[[], float]) -> tuple[list[float], float]:
    """Seconds of each timed step, from one moment when the GPU is idle to the next; and the loss of the last."""
    seconds, loss = [], 0.0
    for _ in range(WARM_UP + TIMED):
        wait()
        begin = time.perf_counter()
        loss = step()
        wait()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARM_UP:], loss


def wait() -> None:
    """Until this rank's GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def world(case: Case) -> Iterator[None]:
    """The default process group, for all cases of this process, which are on grids as large as the first's."""
    if case.is_alone:
        with lone_rank(0, case.world_size, NamedGroup):
            yield
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    yield
    dist.destroy_process_group()


def end_subgroups() -> None:
    """End the process groups that the last case has made: communicators hold memory."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def result(
    step_s: list[float], notes: str, *, loss: float | None = None, peak_bytes: int | None = None
) -> dict[str, Any]:
    """What this rank leaves of a case.

    Args:
        step_s: Seconds of each timed step.
        notes: What a reader must know of precision, kernels and anything that was replaced.
        loss: Of the last step; a case whose loss is no number counts as failed.
        peak_bytes: Largest number of bytes that tensors took; None asks torch, which counts from the case's begin.
    """
    if peak_bytes is None:
        peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "step_s": step_s,
        "peak_allocated_gib": peak_bytes / GIB,
        "notes": notes,
        "loss": loss,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }

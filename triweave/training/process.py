"""Who this process is among the ranks of a run, as its launcher says. Imports no torch: it is asked first."""

from __future__ import annotations

import os
from dataclasses import dataclass

from triweave.errors import InputError, Problem


@dataclass(frozen=True, slots=True)
class Process:
    """This process among the ranks of a run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str = "env://"
    """Where the ranks find each other, as `torch.distributed` takes it."""


def started_by_launcher() -> Process | None:
    """What torchrun (or another launcher that sets the same variables) says of this process; None without one.

    Raises:
        InputError: only some of the variables are set.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return None
    if missing := [name for name in names if name not in found]:
        rule = f"lacks {', '.join(missing)}; torchrun sets all four"
        raise InputError(Problem("environment", ", ".join(found), rule))
    rank, world_size, local_rank, local_world_size = (int(found[name]) for name in names)
    return Process(rank, world_size, local_rank, local_world_size)

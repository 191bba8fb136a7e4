"""Who this process is among the ranks of a run, as its launcher says. Imports no torch: it is asked first."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from triweave.errors import InputError, Problem
from triweave.recovery.stop import STOP_SIGNALS, StopRequest, heed

GRACE_S = 5.0
"""Time that ranks get to end by themselves after another has failed."""


def say_and_leave(message: str) -> NoReturn:
    """End this process at once, from whatever thread, with a message if there is one."""
    if message:
        print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class Process:
    """This process among the ranks of a run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    store_port: int | None = None
    """Port, on the loopback interface, of the store that who started the ranks keeps; None leaves it to a launcher."""
    started_at: float = field(default_factory=time.time, compare=False)
    """When the run began on this host, in seconds since the epoch."""
    stop: StopRequest = field(default_factory=StopRequest, compare=False)
    """What it was asked before it listens."""
    leave: Callable[[str], NoReturn] = say_and_leave
    """Ends this process when its main thread cannot: tells what is wrong, or goes without a word."""

    @property
    def rank_0_keeps_store(self) -> bool:
        """Whether the store that the ranks meet at is rank 0's, and not its launcher's."""
        return self.store_port is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def started_by_launcher() -> Process | None:
    """What torchrun (or another launcher that sets the same variables) says of this process; None without one.

    Raises:
        InputError: only some of the variables are set, or not to what they can be.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    names = (*numbers, "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if missing := [name for name in names if name not in found]:
        rule = f"lacks {', '.join(missing)}; torchrun sets all {len(names)}"
        raise InputError(Problem("environment", ", ".join(found), rule))
    if wrong := [name for name in numbers if not found[name].isdecimal()]:
        raise InputError(Problem(name, repr(found[name]), "must be a number, as torchrun sets it") for name in wrong)
    rank, world_size, local_rank, local_world_size = (int(found[name]) for name in numbers)
    for name, value, size in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, local_world_size)):
        if value >= size:
            raise InputError(Problem(name, value, f"must be below the {size} ranks that torchrun names beside it"))
    return Process(rank, world_size, local_rank, local_world_size)


def end_launcher() -> None:
    """Ask torchrun to end, where it would start the ranks again.

    A run that is given up would be refused each time, and one that was asked to stop would go on.
    """
    most, made = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    if "TORCHELASTIC_RUN_ID" in os.environ and made < most:
        os.kill(os.getppid(), signal.SIGTERM)


def let_segments_grow() -> None:
    """Have torch's allocator on GPUs grow its segments, here and in what this process starts.

    `check` counts with that, and much less is lost to fragments. To be called before torch is imported; who has set the
    allocator up is left alone.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def let_the_first_rank_speak(asked: int = 0) -> None:
    """Wait, on all ranks of a host but its first: what is wrong with the input is wrong for each of them.

    The first one says it and ends, whereupon the launcher ends the others. A rank that is still there after
    `GRACE_S` has met something of its own.

    Args:
        asked: number of a stop signal that was noted, where it can only be the launcher's; 0 is none.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The launcher's signal may have come while it was put off, and nobody listens to what would only be noted.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        heed()
        if asked:
            signal.raise_signal(asked)
        time.sleep(GRACE_S)

"""The ranks of a run: which device each takes, their process group, and how they are started on one host."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from triweave.config.schema import RuntimeConfig
from triweave.errors import InputError, Problem, TriweaveError
from triweave.training.process import Process

GRACE_S = 5.0
"""Time that ranks get to end by themselves after another has failed, before they are killed."""


def choose_device(config: RuntimeConfig, process: Process) -> torch.device:
    """The device of this rank.

    Raises:
        InputError: GPUs are asked for and this host has fewer than its ranks.
    """
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and gpus < process.local_world_size:
        rule = f"needs a GPU for each of the {process.local_world_size} ranks of this host, which has {gpus}"
        raise InputError(Problem("runtime.device", "cuda", rule, "cpu"))
    if gpus < process.local_world_size or gpus == 0:
        return torch.device("cpu")
    return torch.device("cuda", process.local_rank)


@contextmanager
def process_group(process: Process, device: torch.device, timeout_s: int) -> Iterator[None]:
    """The default process group of a run: NCCL on GPUs, gloo on the CPU; none for a single process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if process.world_size == 1:
        yield
        return
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=process.init_method,
        rank=process.rank,
        world_size=process.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(num_ranks: int, function: Callable[[Process], int]) -> int:
    """Run `function` on `num_ranks` processes of this host and return the exit code of the run.

    The first rank that fails ends the others: no rank waits for one that is gone. Ctrl-C reaches all of them.
    """
    if num_ranks == 1:
        return function(Process())
    # One server imports torch once and forks the ranks; it never touches a GPU.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["triweave.training.loop", "triweave.verify.run"])
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    with tempfile.TemporaryDirectory(prefix="triweave-") as folder:
        init_method = Path(folder, "rendezvous").as_uri()
        ranks = [
            context.Process(
                target=_rank_main,
                args=(function, Process(rank, num_ranks, rank, num_ranks, init_method), threads),
                name=f"rank {rank}",
            )
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        try:
            return _wait_for(ranks)
        except KeyboardInterrupt:
            return 130
        finally:
            _end(ranks)


def guarded(function: Callable[[], int]) -> int:
    """Run `function`; an error that triweave raises on purpose becomes one message and its exit code."""
    try:
        return function()
    except TriweaveError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _rank_main(function: Callable[[Process], int], process: Process, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        code = guarded(lambda: function(process))
    except Exception:
        print(f"rank {process.rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        code = 1
    sys.stdout.flush()
    # Not sys.exit: a rank whose peers are gone must not wait for them in a destructor.
    os._exit(code)


def _wait_for(ranks: Sequence[BaseProcess]) -> int:
    """Wait until all ranks are done or one has failed; the first failure's code, or 0."""
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        for sentinel in multiprocessing.connection.wait(list(waiting)):
            rank = waiting.pop(sentinel)  # type: ignore[arg-type]
            rank.join()
            if rank.exitcode:
                if rank.exitcode < 0:
                    name = signal.Signals(-rank.exitcode).name
                    print(f"error: {rank.name} was ended by {name}", file=sys.stderr, flush=True)
                return rank.exitcode if rank.exitcode > 0 else 1
    return 0


def _end(ranks: Sequence[BaseProcess]) -> None:
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        if rank.is_alive():
            rank.terminate()
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        if rank.is_alive():
            rank.kill()
            rank.join()

"""The ranks of a run: which device each takes, their process group, and how they are started on one host."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from triweave.config.schema import RuntimeConfig
from triweave.errors import InputError, Problem, TriweaveError
from triweave.training.process import GRACE_S, Process, let_the_first_rank_speak

SETTLE_S = 0.5
"""Time in which ranks that fail because another did are heard too, so that the first of them is told."""


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
    """The default process group of a run: NCCL on GPUs, gloo on the CPU; none for a single process.

    After an error the group stays: leaving it would make the other ranks fail too, before this one has told why.
    """
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
    yield
    if device.type == "cuda":
        # What peers copy out of this rank's memory, and it out of theirs, is done before anyone is gone.
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended, as it tells the process that started it."""

    code: int
    """Exit code of the rank."""
    message: str = ""
    """What went wrong; empty if nothing did."""
    foreseen: bool = True
    """Whether triweave raised the error on purpose; then other ranks are likely to say the same."""
    time_s: float = field(default_factory=time.monotonic)
    """When: one clock for all processes of a host."""


def run_ranks(num_ranks: int, function: Callable[[Process], int]) -> int:
    """Run `function` on `num_ranks` processes of this host and return the exit code of the run.

    The first rank that fails ends the others and is the only one that is told of: no rank waits for one that is
    gone. Ctrl-C ends all of them, and so does the end of this process, whatever ended it.
    """
    if num_ranks == 1:
        return function(Process())
    context = mp.get_context("forkserver")
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    ranks: dict[Connection, BaseProcess] = {}
    with tempfile.TemporaryDirectory(prefix="triweave-") as folder:
        init_method = Path(folder, "rendezvous").as_uri()
        try:
            with _interrupt_put_off():
                _start_server(context)
                for number in range(num_ranks):
                    process = Process(number, num_ranks, number, num_ranks, init_method)
                    told, tell = context.Pipe(duplex=False)
                    rank = context.Process(
                        target=_rank_main, args=(function, process, threads, tell), name=f"rank {number}", daemon=True
                    )
                    rank.start()
                    tell.close()
                    ranks[told] = rank
            return _wait_for(ranks)
        except KeyboardInterrupt:
            return 130
        finally:
            _end(list(ranks.values()))


def run_as_rank(process: Process, function: Callable[[Process], int]) -> int:
    """Run `function` as the rank that a launcher has made of this process and return its exit code.

    Does not return after an error: a rank whose peers are gone must not wait for them in a destructor.
    """
    ending = _ending_of(function, process)
    if ending.message:
        if ending.foreseen:
            let_the_first_rank_speak()
        print(f"error: {ending.message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(ending.code)
    return ending.code


def _ending_of(function: Callable[[Process], int], process: Process) -> Ending:
    try:
        return Ending(function(process))
    except TriweaveError as error:
        return Ending(error.exit_code, str(error))
    except KeyboardInterrupt:
        return Ending(130, f"rank {process.rank} was interrupted")
    except Exception:
        return Ending(1, f"rank {process.rank} failed\n{traceback.format_exc().rstrip()}", foreseen=False)


@contextmanager
def _interrupt_put_off() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: a rank that was half started could not be ended."""
    interrupts: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if interrupts:
        raise KeyboardInterrupt


def _start_server(context: mp.context.ForkServerContext) -> None:
    """Start the server that imports torch once and forks the ranks; it never touches a GPU."""
    context.set_forkserver_preload(["triweave.training.loop", "triweave.verify.run"])
    # Started first by itself: in starting it CPython 3.11 unblocks the signal that is to stay blocked.
    resource_tracker.ensure_running()
    # Ctrl-C reaches every process of a terminal. The server and the ranks leave it to the one that started them.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _rank_main(function: Callable[[Process], int], process: Process, threads: int, tell: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    ending = _ending_of(function, process)
    sys.stdout.flush()
    tell.send(ending)
    os._exit(ending.code)  # why not sys.exit: see run_as_rank


def _end_with_parent() -> None:
    """End this rank when the process that started it is gone, even if that was killed."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _wait_for(ranks: Mapping[Connection, BaseProcess]) -> int:
    """Wait until all ranks are done or one has failed; tell what failed first and return its code, or 0."""
    waiting = dict(ranks)
    failures: list[Ending] = []
    deadline = float("inf")
    while waiting and time.monotonic() < deadline:
        patience = max(0.0, deadline - time.monotonic()) if failures else None
        ready = multiprocessing.connection.wait(list(waiting), patience)
        for told in [told for told in waiting if told in ready]:
            ending = _told(told, waiting.pop(told))
            if ending.code:
                failures.append(ending)
                deadline = min(deadline, time.monotonic() + SETTLE_S)
    if not failures:
        return 0
    first = min(failures, key=lambda ending: ending.time_s)
    if first.message:
        print(f"error: {first.message}", file=sys.stderr, flush=True)
    return first.code


def _told(told: Connection, rank: BaseProcess) -> Ending:
    """What a rank says of its end, or what is seen of it if it could say nothing."""
    try:
        ending: Ending = told.recv()
        return ending
    except (EOFError, OSError):
        rank.join()
    code = rank.exitcode or 0
    if code >= 0:
        return Ending(1, f"{rank.name} left with exit code {code}")
    name = signal.Signals(-code).name
    # A library may abort because a peer is gone; any other signal came first.
    when = time.monotonic() if name == "SIGABRT" else 0.0
    return Ending(1, f"{rank.name} was ended by {name}", time_s=when)


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

"""Run a function on several gloo ranks: the processes start once and are used by all tests of a session."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from triweave.training.rank_server import ASKING, PRELOAD, start_server

TIMEOUT_S = 120
TESTS_PRELOAD = (*PRELOAD, "triweave.cli", "transformers.models.auto", "pytest", "hypothesis")
"""And what test files import: a rank is there in milliseconds, and not after seconds of a processor."""


def _serve(connection: Connection, stacks: Path) -> None:
    import torch
    import torch.distributed as dist

    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    # Written by the signal's handler itself, so also where the interpreter's lock is never given back.
    faulthandler.register(signal.SIGUSR2, file=stacks.open("w"), all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # What the server imported, some 300,000 objects, is no garbage: no collection is to look at it again.
    while True:
        job = connection.recv()
        if job is None:
            return
        function, args, rank, world_size, store = job
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            connection.send((True, function(rank, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Ranks:
    """A pool of processes; `run` gives the first `world_size` of them the same function."""

    def __init__(self) -> None:
        self.context = start_server(TESTS_PRELOAD)
        self.workers: list[tuple[Any, Connection]] = []
        # Of stores and stacks, kept until the processes are gone: torch's file store, which a rank drops after it
        # has answered, waits its whole time-out (2.13) for a folder that is removed while it does so.
        self.folder = Path(tempfile.mkdtemp())
        self.runs = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(rank, *args)` on every rank of a fresh gloo group; returns what each gave, by rank."""
        while len(self.workers) < world_size:
            ours, theirs = self.context.Pipe()
            self.folder.mkdir(exist_ok=True)
            process = self.context.Process(target=_serve, args=(theirs, self._stacks(len(self.workers))), daemon=True)
            process.start()
            self.workers.append((process, ours))
        self.runs += 1
        store = str(self.folder / f"store-{self.runs}")
        for rank, (_, connection) in enumerate(self.workers[:world_size]):
            connection.send((function, args, rank, world_size, store))
        answers: list[Any] = []
        for rank, (_, connection) in enumerate(self.workers[:world_size]):
            if not connection.poll(TIMEOUT_S):
                stacks = self.where(world_size)
                self.close()
                raise TimeoutError(f"rank {rank} of {world_size} gave no answer in {TIMEOUT_S} s\n{stacks}")
            answers.append(connection.recv())
        failures = [f"rank {rank}:\n{answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if failures:
            # After a failure the other ranks may still sit in a collective: start with new processes next time.
            self.close()
            raise RuntimeError("\n".join(failures))
        return [answer for _, answer in answers]

    def where(self, world_size: int) -> str:
        """The stacks of all threads of the first ranks."""
        for process, _ in self.workers[:world_size]:
            os.kill(process.pid, signal.SIGUSR2)
        time.sleep(1)
        return "\n".join(f"rank {rank}:\n{self._stacks(rank).read_text()}" for rank in range(world_size))

    def _stacks(self, rank: int) -> Path:
        return self.folder / f"stacks-{rank}"

    def close(self) -> None:
        """End all processes."""
        for process, connection in self.workers:
            process.kill()
            connection.close()
        self.workers = []
        shutil.rmtree(self.folder, ignore_errors=True)

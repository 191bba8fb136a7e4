"""Run a function on several gloo ranks: the processes start once and are used by all tests of a session."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 120


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
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
        # Children are forked from one server that has imported torch already: a rank starts in milliseconds.
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["torch", "torch.distributed.tensor", "triweave.training.step", "pytest", "hypothesis"]
        )
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(rank, *args)` on every rank of a fresh gloo group; returns what each gave, by rank."""
        while len(self.workers) < world_size:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.workers.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            for rank, (_, connection) in enumerate(self.workers[:world_size]):
                connection.send((function, args, rank, world_size, store))
            answers: list[Any] = []
            for rank, (_, connection) in enumerate(self.workers[:world_size]):
                if not connection.poll(TIMEOUT_S):
                    self.close()
                    raise TimeoutError(f"rank {rank} of {world_size} gave no answer in {TIMEOUT_S} s")
                answers.append(connection.recv())
        failures = [f"rank {rank}:\n{answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if failures:
            # After a failure the other ranks may still sit in a collective: start with new processes next time.
            self.close()
            raise RuntimeError("\n".join(failures))
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self.workers:
            process.kill()
            connection.close()
        self.workers = []

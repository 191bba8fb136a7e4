"""From a run file to ranks at work: what `train`, `verify` and `demo` share.

Everything that can be wrong with a run is found before torch is imported, let alone a process group made.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from triweave.config.load import load_run
from triweave.config.schema import Run
from triweave.config.validate import ResolvedRun, validate
from triweave.errors import InputError, Problem
from triweave.host_room import host_room
from triweave.recovery.stop import StopRequest
from triweave.training.import_torch import import_torch, require_torch
from triweave.training.process import Process, let_segments_grow, started_by_launcher
from triweave.training.rank_server import start_server
from triweave.training.start_ranks import run_as_rank, run_ranks

if TYPE_CHECKING:
    from triweave.data.cache import PreparedData


@dataclass(frozen=True, slots=True)
class Job:
    """What to do with a run that is in order."""

    rank: Callable[[ResolvedRun, PreparedData, Process], int]
    """What each rank does; returns its exit code."""
    before: Callable[[ResolvedRun, PreparedData], None] = lambda resolved, prepared: None
    """Work of one process before the ranks meet."""
    heard: Callable[[ResolvedRun, int, str, Sequence[int]], None] = lambda resolved, code, message, pids: None
    """Told the end of ranks that were started here, as `run_ranks` tells it."""


def train_rank(resolved: ResolvedRun, prepared: PreparedData, process: Process) -> int:
    """`loop.train`, imported where the ranks are: who only starts them does without it."""
    from triweave.training.loop import train

    return train(resolved, prepared, process)


def start(
    run_file: Path,
    overrides: Sequence[str],
    nproc: int | None,
    job: Callable[[], Job],
    adjust: Callable[[Run, int], Run] = lambda run, dp: run,
    stop: StopRequest | None = None,
    *,
    works_before: bool = False,
) -> int:
    """Check a run, prepare its data, and do a job on every rank; returns the exit code.

    Under torchrun this process is one rank; otherwise it starts `nproc` ranks, or as many as the layout has.

    Args:
        run_file: the YAML file.
        overrides: words of the command line that change its keys.
        nproc: ranks to start on this host; None takes what the layout says.
        job: imports and gives the job, once the run is in order.
        adjust: changes the run, told its data-parallel size, before it is checked for good.
        stop: what this process was asked; None where the job does not listen to stop signals.
        works_before: whether what the job does before the ranks meet takes long: their server imports beside it. A job
            that refuses then keeps who reads its output waiting until the server has imported.

    Raises:
        InputError: something is wrong with the run, or the ranks cannot be started here.
    """
    begun = time.time()
    let_segments_grow()
    launched = started_by_launcher()
    if launched is not None and stop is not None:
        stop.parent = os.getppid()
    run = load_run(run_file, overrides)
    if launched is not None and nproc is not None:
        raise InputError(Problem("--nproc", nproc, f"a launcher has started {launched.world_size} ranks already"))
    if nproc is not None and nproc < 1:
        raise InputError(Problem("--nproc", nproc, "must be at least 1", "1"))
    per_node = launched.local_world_size if launched else None
    first = validate(run, world_size=launched.world_size if launched else nproc, gpus_per_node=per_node)
    world_size = first.layout.world_size
    if launched is None:
        check_one_host(first)
    resolved = validate(adjust(run, first.layout.dp), world_size=world_size, gpus_per_node=per_node)

    if resolved.layout.offload:
        from triweave.training.host_need import check_offload

        check_offload(resolved, launched or Process(local_world_size=world_size), host_room())

    if run.runtime.device == "cuda":
        # The one thing that only torch can tell; asked before the work on the data.
        import_torch()
        from triweave.training.processes import choose_device

        choose_device(run.runtime, launched or Process(local_world_size=world_size))

    from triweave.data.cache import prepare

    with _progress(speaks=launched is None or launched.local_rank == 0) as progress:
        prepared = prepare(resolved.run, resolved.spec.vocab_size, progress)

    if launched is None and world_size > 1:
        # The server that forks them imports it.
        require_torch()
        if works_before:
            start_server()
    else:
        import_torch()
    todo = job()
    if launched is None or launched.rank == 0:
        with _refusing_for_all(launched):
            todo.before(resolved, prepared)
    rank = functools.partial(todo.rank, resolved, prepared)
    if launched is None:
        heard = functools.partial(todo.heard, resolved)
        return run_ranks(world_size, rank, stop=stop, started_at=begun, heard=heard)
    return run_as_rank(launched if stop is None else replace(launched, stop=stop), rank)


def _refusing_for_all(launched: Process | None) -> AbstractContextManager[None]:
    """`refusing_for_all`, imported where there is a launcher: the ranks that this process starts are not there yet."""
    if launched is None:
        return nullcontext()
    from triweave.training.rank_order import refusing_for_all

    return refusing_for_all(launched)


def check_one_host(resolved: ResolvedRun) -> None:
    """Refuse to start here what needs several hosts.

    Raises:
        InputError: the run's cluster has more than one node.
    """
    cluster = resolved.cluster
    if cluster is not None and cluster.num_nodes > 1:
        command = f"torchrun --nnodes {cluster.num_nodes} --nproc-per-node {cluster.gpus_per_node} -m triweave"
        rule = f"has {cluster.num_nodes} nodes; start each of them with {command} ..."
        raise InputError(Problem("cluster", str(cluster), rule))


@contextmanager
def _progress(*, speaks: bool) -> Iterator[Callable[[str, int], None]]:
    """Tells how far the data is: on one line that is written over, or a line each where there is no terminal."""
    terminal = speaks and sys.stderr.isatty()
    begin, end = ("\r", "\x1b[K") if terminal else ("", "\n")

    def tell(what: str, count: int) -> None:
        if speaks:
            print(f"{begin}preparing data: {what} {count:,}", end=end, file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if terminal:
            print(f"{begin}{end}", end="", file=sys.stderr, flush=True)

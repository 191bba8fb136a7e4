"""From a run file to validated ranks with their data prepared: what `train`, `verify` and `demo` share."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from triweave.cluster import parse_cluster
from triweave.config.load import load_run
from triweave.config.schema import Run
from triweave.config.validate import ResolvedRun, validate
from triweave.data.cache import PreparedData, prepare
from triweave.errors import InputError, Problem
from triweave.training.processes import Process, run_ranks, started_by_launcher

RankFunction = Callable[[ResolvedRun, PreparedData, Process], int]


def start(
    run_file: Path,
    overrides: Sequence[str],
    nproc: int | None,
    function: RankFunction,
    *,
    adjust: Callable[[Run, int], Run] = lambda run, _: run,
    before_ranks: Callable[[ResolvedRun, PreparedData], None] = lambda resolved, prepared: None,
) -> int:
    """Check a run, prepare its data, and run `function` on every rank; returns the exit code.

    Under torchrun this process is one rank; otherwise it starts `nproc` ranks, or as many as the layout has.

    Args:
        run_file: the YAML file.
        overrides: words of the command line that change its keys.
        nproc: ranks to start on this host; None takes what the layout says.
        function: what each rank does.
        adjust: changes the run, told its data-parallel size, before it is checked for good.
        before_ranks: work of one process before the ranks meet.

    Raises:
        InputError: something is wrong with the run, or the ranks cannot be started here.
    """
    launched = started_by_launcher()
    run = load_run(run_file, overrides)
    if launched is not None and nproc is not None:
        raise InputError(Problem("--nproc", nproc, f"a launcher has started {launched.world_size} ranks already"))
    world_size = launched.world_size if launched else ranks_to_start(run, nproc)
    per_node = launched.local_world_size if launched else None
    first = validate(run, world_size=world_size, gpus_per_node=per_node)
    resolved = validate(adjust(run, first.layout.dp), world_size=world_size, gpus_per_node=per_node)
    speaks = launched is None or launched.local_rank == 0
    prepared = prepare(resolved.run, resolved.spec.vocab_size, _progress if speaks else None)
    if launched is None or launched.rank == 0:
        before_ranks(resolved, prepared)
    if launched is not None:
        return function(resolved, prepared, launched)
    return run_ranks(world_size, functools.partial(function, resolved, prepared))


def ranks_to_start(run: Run, nproc: int | None) -> int:
    """Ranks that this host is to start.

    Raises:
        InputError: the run is for several hosts.
    """
    if nproc is not None:
        if nproc < 1:
            raise InputError(Problem("--nproc", nproc, "must be at least 1", "1"))
        return nproc
    if run.cluster is not None:
        cluster = parse_cluster(run.cluster)
        if cluster.num_nodes > 1:
            command = f"torchrun --nnodes {cluster.num_nodes} --nproc-per-node {cluster.gpus_per_node} -m triweave"
            rule = f"has {cluster.num_nodes} nodes; start each of them with {command} ..."
            raise InputError(Problem("cluster", run.cluster, rule))
        return cluster.world_size
    layout = run.layout
    return max(1, layout.tp * layout.pp * layout.cp * (layout.dp or 1))


def _progress(what: str, count: int) -> None:
    """A line now and then; a carriage return only where there is a terminal."""
    text = f"preparing data: {what} {count:,}"
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)

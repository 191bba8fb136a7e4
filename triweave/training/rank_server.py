"""The server that imports once what a rank needs and forks the ranks of this host. Who starts it needs no torch."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

from triweave.recovery.stop import STOP_SIGNALS

PRELOAD = ("triweave.training.loop", "triweave.verify.run")
"""Modules that a rank finds imported."""

ASKING = frozenset({signal.SIGINT, *STOP_SIGNALS})
"""Signals that ask a rank to stop. They reach every process of a terminal or a job; who started the ranks decides."""


@contextmanager
def asking_put_off() -> Iterator[None]:
    """Let `ASKING` wait for the end of the block: a rank that is half started cannot be ended, nor told to stop."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def start_server(preload: Sequence[str] = PRELOAD) -> ForkServerContext:
    """Start the server that forks the ranks, unless this process has one; it never touches a GPU.

    It and what it forks are born with `ASKING` blocked: a rank unblocks them where it listens.

    Args:
        preload: modules that it imports before it forks; one that runs already keeps its own.

    Returns:
        What makes processes that the server forks.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with asking_put_off():
        # Started first by itself: in starting it CPython 3.11 unblocks signals that are to stay blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        forkserver.ensure_running()
    return context


def end_with_parent() -> None:
    """Wait for the end of the process that started this one, however it comes, and end this one with it."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

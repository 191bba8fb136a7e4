"""Starts the ranks of a run on one host, waits for them and ends them, or runs the one that a launcher has started.

Who starts them imports no torch: the server that forks them does, and the keeper of their store is forked by it too.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn

from triweave.errors import GivenUp, Refused, TriweaveError
from triweave.recovery.stop import STOP_SIGNALS, STOPPED, StopRequest
from triweave.training.process import GRACE_S, Process, end_launcher, let_the_first_rank_speak
from triweave.training.rank_server import asking_put_off, end_with_parent, start_server
from triweave.training.rank_store import start_store

SETTLE_S = 0.5
"""Time in which ranks that fail because another did are heard too, so that the first of them is told."""

_BEFORE_ALL = float("-inf")
"""When an ending was that the ranks have found out together, or their store's: nothing is waited for, and nothing told
in its place."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended, as it tells the process that started it."""

    code: int
    """Exit code of the rank."""
    message: str = ""
    """What went wrong; empty if nothing did."""
    foreseen: bool = True
    """Whether triweave raised the error on purpose; then other ranks are likely to say the same."""
    is_consequence: bool = False
    """Whether the rank only lost a peer: what ended the peer is the thing to tell."""
    is_last: bool = False
    """Whether the run is not to be started again."""
    is_refused: bool = False
    """Whether rank 0 did not begin: where it is, it says it itself."""
    time_s: float = field(default_factory=time.monotonic)
    """When: one clock for all processes of a host."""


def run_ranks(
    num_ranks: int,
    function: Callable[[Process], int],
    *,
    stop: StopRequest | None = None,
    started_at: float | None = None,
    heard: Callable[[int, str, Sequence[int]], None] = lambda code, message, pids: None,
) -> int:
    """Run `function` on `num_ranks` processes of this host and return the exit code of the run.

    The first rank that fails ends the others and is the only one that is told of: no rank waits for one that is
    gone. Ctrl-C ends all of them, and so does the end of this process, whatever ended it.

    Args:
        num_ranks: how many.
        function: what each does; returns its exit code.
        stop: what this process was asked so far, where `function` listens to `stop_requests`. Then this process hands
            stop signals on, and only a second one ends the run at once. None where it does not listen.
        started_at: when the run began, in seconds since the epoch; None is now.
        heard: is told at the end, where there are several ranks: exit code, message (empty if there is none), and the
            process ids of the ranks.
    """
    started_at = time.time() if started_at is None else started_at
    if num_ranks == 1:
        return function(Process(started_at=started_at, stop=stop or StopRequest()))
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    ranks: dict[Connection, BaseProcess] = {}
    store: dict[Connection, BaseProcess] = {}
    with _forwarding(ranks, stop) if stop is not None else nullcontext():
        try:
            with asking_put_off():
                context = start_server()
                port, told, keeper = start_store(context)
                store[told] = keeper
                asked = stop or StopRequest()
                for number in range(num_ranks):
                    process = Process(number, num_ranks, number, num_ranks, port, started_at, asked)
                    told, tell = context.Pipe(duplex=False)
                    rank = context.Process(
                        target=_rank_main,
                        args=(function, process, threads, tell, stop is not None),
                        name=f"rank {number}",
                        daemon=True,
                    )
                    rank.start()
                    tell.close()
                    ranks[told] = rank
            code, message = _wait_for(ranks, store)
        except KeyboardInterrupt:
            code, message = 130, ""
        except _StopAtOnce as again:
            code, message = 128 + again.number, ""
        finally:
            _end([*ranks.values(), *store.values()])
        heard(code, message, [rank.pid for rank in ranks.values() if rank.pid is not None])
        return code


def run_as_rank(process: Process, function: Callable[[Process], int]) -> int:
    """Run `function` as the rank that a launcher has made of this process and return its exit code.

    Does not return after an error: a rank whose peers are gone must not wait for them in a destructor.
    """
    ending = _ending_of(function, process)
    if ending.message:
        if ending.is_consequence:
            time.sleep(GRACE_S)  # in which the launcher hears of the rank that is the cause, and ends this one
        elif ending.foreseen:
            let_the_first_rank_speak(process.stop.number if ending.is_refused else 0)
        print(f"error: {ending.message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if ending.is_last:
            end_launcher()
        os._exit(ending.code)
    if ending.code == STOPPED and process.rank == 0:
        end_launcher()
    return ending.code


_LOST_PEER = re.compile(r"[Cc]onnection (closed|reset) by|[Bb]roken pipe|ncclRemoteError|remote process exited")
"""How gloo, NCCL and the store say that another process is gone; they know its address and not its rank."""


def _ending_of(function: Callable[[Process], int], process: Process) -> Ending:
    try:
        return Ending(function(process))
    except Refused as error:
        return Ending(error.exit_code, str(error), is_refused=True)
    except TriweaveError as error:
        is_last = isinstance(error, GivenUp)
        return Ending(error.exit_code, str(error), is_consequence=lost_a_peer(error), is_last=is_last)
    except KeyboardInterrupt:
        return Ending(130, f"rank {process.rank} was interrupted")
    except Exception as error:
        message = f"rank {process.rank} failed\n{traceback.format_exc().rstrip()}"
        return Ending(1, message, foreseen=False, is_consequence=lost_a_peer(error))


def lost_a_peer(error: Exception) -> bool:
    """Whether all that an error says is that another rank is gone: what ended that one is the thing to tell."""
    return _LOST_PEER.search(str(error)) is not None


class _StopAtOnce(BaseException):
    """A second stop signal has come."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _forwarding(ranks: Mapping[Connection, BaseProcess], stop: StopRequest) -> Iterator[None]:
    """Hand the first stop signal on to the ranks; the second ends the block. Who is not born yet is born with it."""

    def forward(number: int, frame: object) -> None:
        if stop.is_repeated(number):
            raise _StopAtOnce(number)
        stop.ask(number)
        for rank in list(ranks.values()):
            if rank.pid is not None and rank.is_alive():
                os.kill(rank.pid, number)

    former = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _rank_main(
    function: Callable[[Process], int], process: Process, threads: int, tell: Connection, stoppable: bool
) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    if not stoppable:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    import torch

    torch.set_num_threads(threads)
    ending = _ending_of(function, replace(process, leave=partial(_tell_and_leave, tell)))
    sys.stdout.flush()
    tell.send(ending)
    os._exit(ending.code)  # why not sys.exit: see run_as_rank


def _tell_and_leave(tell: Connection, message: str) -> NoReturn:
    """`Process.leave` of a rank that was started here. What it says was found out together: it comes first."""
    if message:
        tell.send(Ending(1, message, time_s=_BEFORE_ALL))
    os._exit(1)


def _wait_for(ranks: Mapping[Connection, BaseProcess], store: Mapping[Connection, BaseProcess] = {}) -> tuple[int, str]:
    """Wait until all ranks are done or one has failed; tell what failed first and return its code and message.

    A rank that ends with a code and no message has not failed: the run's answer is its code. The process of the store
    is not waited for; where it ends, the run has failed, and what ranks say of it does not matter.
    """
    waiting = {**ranks, **store}
    failures: list[Ending] = []
    answer = 0
    deadline = float("inf")
    while waiting.keys() & ranks.keys() and time.monotonic() < deadline:
        patience = max(0.0, deadline - time.monotonic()) if failures else None
        ready = multiprocessing.connection.wait(list(waiting), patience)
        for told in [told for told in waiting if told in ready]:
            ending = _told(told, waiting.pop(told))
            if told in store:
                ending = replace(ending, time_s=_BEFORE_ALL)
            if ending.message:
                failures.append(ending)
                deadline = min(deadline, time.monotonic() + _patience_s(ending))
            answer = answer or ending.code
    if not failures:
        return answer, ""
    first = min(failures, key=lambda ending: (ending.is_consequence, ending.time_s))
    print(f"error: {first.message}", file=sys.stderr, flush=True)
    return first.code, first.message


def _patience_s(ending: Ending) -> float:
    """Time in which something may be heard that is more to the point."""
    if ending.time_s == _BEFORE_ALL:
        return 0.0
    return GRACE_S if ending.is_consequence else SETTLE_S


_LIKELY_CAUSES = {
    "SIGKILL": "; if nobody did, the kernel, for want of host memory",
    "SIGBUS": "; a file that it had mapped was cut short, or its disk failed",
}


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
    return Ending(1, f"{rank.name} was ended by {name}{_LIKELY_CAUSES.get(name, '')}", time_s=when)


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End what is left. Not by a signal that asks: a rank without its peers could not do what it is asked."""
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
    for rank in ranks:
        rank.join()

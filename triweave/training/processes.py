"""The ranks of a run: which device each takes, their process group, and how they are started on one host."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from triweave.config.schema import RuntimeConfig
from triweave.errors import GivenUp, InputError, Problem, Refused, RunFailed, TriweaveError
from triweave.recovery.self_check import together
from triweave.recovery.stop import STOP_SIGNALS, STOPPED, StopRequest
from triweave.training.process import GRACE_S, Process, end_launcher, let_the_first_rank_speak
from triweave.training.rank_server import asking_put_off, start_server

SETTLE_S = 0.5
"""Time in which ranks that fail because another did are heard too, so that the first of them is told."""

_BEFORE_ALL = float("-inf")
"""When an ending was that the ranks have found out together: nothing is waited for, and nothing told in its place."""


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


def meet(process: Process, timeout_s: float) -> Store | None:
    """The store at which the ranks of a run find each other; None for a single process.

    Raises:
        RunFailed: it is not to be reached.
    """
    if process.world_size == 1:
        return None
    timeout = timedelta(seconds=timeout_s)
    # What a collective was, to which group and how large, is kept of the last so many: for whoever asks after a hang.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if process.store_port is not None:
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return TCPStore("127.0.0.1", process.store_port, is_master=False, timeout=timeout)
    store: Store
    try:
        store, _, _ = next(rendezvous("env://", process.rank, process.world_size, timeout=timeout))
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunFailed(
            f"rank {process.rank} on {socket.gethostname()} has not reached the store of rank 0 at {address} within"
            f" {timeout_s:.0f} s: that name must resolve here, the port be open, and the first host be running"
            f" ({str(error).splitlines()[0]})"
        ) from None
    if process.local_world_size == process.world_size:
        # torchrun keeps one store for all attempts, and a new rank would read where a dead one listened (pytorch issue
        # 135712). The attempts of several hosts may be numbered differently: there torchrun must be told, see docs.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store


@contextmanager
def process_group(
    process: Process, device: torch.device, timeout_s: float, store: Store | None = None
) -> Iterator[None]:
    """The default process group of a run: NCCL on GPUs, gloo on the CPU; none for a single process.

    After an error the group stays: leaving it would make the other ranks fail too, before this one has told why.

    Args:
        process: this rank.
        device: its device.
        timeout_s: seconds after which a collective gives up.
        store: where the ranks have met already; None lets them meet now.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if process.world_size == 1:
        yield
        return
    store = store or meet(process, timeout_s)
    with together(store, "making the process group of all ranks", process.rank, process.world_size):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
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
    with _forwarding(ranks, stop) if stop is not None else nullcontext():
        try:
            with asking_put_off():
                context = start_server()
                store = _loopback_store()
                asked = stop or StopRequest()
                for number in range(num_ranks):
                    process = Process(number, num_ranks, number, num_ranks, store.port, started_at, asked)
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
            code, message = _wait_for(ranks)
        except KeyboardInterrupt:
            code, message = 130, ""
        except _StopAtOnce as again:
            code, message = 128 + again.number, ""
        finally:
            _end(list(ranks.values()))
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


def _loopback_store() -> TCPStore:
    """The store at which the ranks meet. Left to itself it would listen on every interface, to anybody."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        # The store closes the descriptor that it is given.
        return TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )


def _rank_main(
    function: Callable[[Process], int], process: Process, threads: int, tell: Connection, stoppable: bool
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if not stoppable:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
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


def _end_with_parent() -> None:
    """End this rank when the process that started it is gone, even if that was killed."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _wait_for(ranks: Mapping[Connection, BaseProcess]) -> tuple[int, str]:
    """Wait until all ranks are done or one has failed; tell what failed first and return its code and message.

    A rank that ends with a code and no message has not failed: the run's answer is its code.
    """
    waiting = dict(ranks)
    failures: list[Ending] = []
    answer = 0
    deadline = float("inf")
    while waiting and time.monotonic() < deadline:
        patience = max(0.0, deadline - time.monotonic()) if failures else None
        ready = multiprocessing.connection.wait(list(waiting), patience)
        for told in [told for told in waiting if told in ready]:
            ending = _told(told, waiting.pop(told))
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

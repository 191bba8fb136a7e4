"""A request to stop: SIGTERM, SIGUSR1, or the end of the launcher. Imports no torch.

A request may come at any moment. Until the command line is read it waits in the kernel (`put_off`); then it is noted,
while torch is imported and the data are prepared (`noting`); then the rank listens (`stop_requests`), or the process
that starts the ranks hands it on. One `StopRequest` is passed along, so that nothing is lost between them.

A signal handler in Python waits for the main thread, and that for a collective, which may take minutes. What happens at
once is that a byte is written in C, which another thread reads.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 75
"""Exit code of a run that stopped on request with everything saved: start it again (EX_TEMPFAIL of sysexits.h)."""

WARNING = signal.SIGUSR1
"""May be repeated: a launcher's script does so, for it cannot know which ranks are there to hear it."""

STOP_SIGNALS = (signal.SIGTERM, WARNING)
"""What schedulers send before they kill: Kubernetes and torchrun the first, Slurm either."""

REPEAT_S = 1.0
"""A signal that reaches a process directly and through its launcher comes twice within this time, and counts once."""

PARENT_GONE = signal.SIGHUP
"""What the end of the launcher counts as: torchrun dies of a signal that it was not told to forward."""


class StopRequest:
    """What this process was asked."""

    def __init__(self, number: int = 0) -> None:
        """`number`: of a signal that was heard before, by who starts this process."""
        self.number = number
        """Of the signal that asks to stop; 0 as long as none does."""
        self.parent: int | None = None
        """The launcher, whose end counts as a request; None where there is none."""
        self._since = time.monotonic()

    def is_repeated(self, number: int) -> bool:
        """Whether a signal that comes now is a second one, which ends the process at once."""
        return self.number != 0 and number != WARNING and time.monotonic() - self._since > REPEAT_S

    def ask(self, number: int) -> None:
        """Take a signal in. A second one ends the process at once, as the signal itself would have."""
        if self.is_repeated(number):
            os._exit(128 + number)
        if self.number == 0:
            self.number, self._since = number, time.monotonic()


def put_off() -> None:
    """Let stop signals wait for `noting`: the imports of the command line alone take a tenth of a second."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def heed() -> None:
    """Let stop signals through again that were put off, those that wait among them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def noting() -> Iterator[StopRequest]:
    """Note stop signals for as long as the block lasts, for who listens later; called on the main thread.

    Where an error ends the block, what was noted waits again, as after `put_off`: nobody will listen.
    """
    request = StopRequest()
    former = {number: signal.signal(number, lambda number, _: request.ask(number)) for number in STOP_SIGNALS}
    heed()
    try:
        yield request
    except BaseException:
        put_off()
        if request.number:
            signal.raise_signal(request.number)
        raise
    finally:
        # It is done: a warning that comes, or is repeated, while the interpreter ends must not change the exit code.
        for number, handler in {**former, WARNING: signal.SIG_IGN}.items():
            signal.signal(number, handler)


@contextmanager
def stop_requests(request: StopRequest) -> Iterator[StopRequest]:
    """Take stop signals in for as long as the block lasts; called on the main thread.

    `request` holds what was noted before, and is what the block gets.
    """
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(REPEAT_S)
    former_wakeup = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    former = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    reader = threading.Thread(target=_read, args=(theirs, request), name="stop requests", daemon=True)
    reader.start()
    # The server that forks ranks keeps them blocked, so that none is lost before somebody listens.
    heed()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(former_wakeup)
        for number, handler in former.items():
            signal.signal(number, handler)
        ours.close()
        reader.join()
        theirs.close()


def signal_name(number: int) -> str:
    """`SIGTERM` for 15; the launcher's end has no signal."""
    return "the end of the launcher" if number == PARENT_GONE else signal.Signals(number).name


def _read(wakeups: socket.socket, request: StopRequest) -> None:
    """Read signal numbers until the other end is closed."""
    while True:
        try:
            numbers = wakeups.recv(64)
            if not numbers:
                return
        except TimeoutError:
            numbers = b""
        for number in numbers:
            if number in STOP_SIGNALS:
                request.ask(number)
        if request.number == 0 and request.parent not in (None, os.getppid()):
            request.ask(PARENT_GONE)

"""A request to stop: SIGTERM, SIGUSR1, or the end of the launcher. Imports no torch.

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

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill: Kubernetes and torchrun the first, Slurm either."""

REPEAT_S = 1.0
"""A signal that reaches a process directly and through its launcher comes twice within this time, and counts once."""

PARENT_GONE = signal.SIGHUP
"""What the end of the launcher counts as: torchrun dies of a signal that it was not told to forward."""


class StopRequest:
    """What this process was asked."""

    def __init__(self) -> None:
        self.number = 0
        """Of the signal that asks to stop; 0 as long as none does."""
        self._since = 0.0

    def ask(self, number: int) -> None:
        """Take a signal in. The second one ends the process at once, as the signal itself would have."""
        if self.number == 0:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > REPEAT_S:
            os._exit(128 + number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take stop signals in for as long as the block lasts; called on the main thread."""
    request = StopRequest()
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(REPEAT_S)
    former_wakeup = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    former = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    reader = threading.Thread(target=_read, args=(theirs, request, os.getppid()), name="stop requests", daemon=True)
    reader.start()
    # The server that forks ranks keeps them blocked, so that none is lost before somebody listens.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
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


def _read(wakeups: socket.socket, request: StopRequest, parent: int) -> None:
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
        if request.number == 0 and os.getppid() != parent:
            request.ask(PARENT_GONE)

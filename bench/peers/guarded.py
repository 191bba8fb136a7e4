"""Start a rank that cannot outlive its time, nor the process that started it.

    python guarded.py SECONDS PROGRAM [ARGUMENT ...]

The alarm and the wish to die with the parent survive `exec`, and the alarm's default action ends a process even while
it waits in a collective: no rank is left holding the memory of a GPU.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    limit, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(int(limit))
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()

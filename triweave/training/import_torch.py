"""The import of torch, with which whatever computes begins. Itself it imports none."""

from __future__ import annotations

import importlib.util
import signal


def import_torch() -> None:
    """Import torch, and with it numpy, while Ctrl-C waits.

    A KeyboardInterrupt that comes while torch (2.11 to 2.13) imports numpy is cleared by its C++: the command would go
    on as if nobody had pressed it, and with half a numpy.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        import torch  # noqa: F401 (for who imports it next)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def require_torch() -> None:
    """Fail as `import_torch` does where there is no torch, for who leaves the import to other processes.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

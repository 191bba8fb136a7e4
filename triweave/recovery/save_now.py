"""A checkpoint on demand: a person makes a file in the run's folder, and the running job saves. Imports no torch.

A file and not a signal. A signal that torchrun hands on ends torchrun too, and one that it does not know ends it at
once (the default action of SIGUSR2); Slurm's `scancel --signal` reaches every process of a step, torchrun among them;
Kubernetes sends SIGTERM and nothing else. A file in a folder that all hosts share needs no process id, no host and no
launcher.
"""

from __future__ import annotations

import time
from pathlib import Path

from triweave.run_folder import SAVE_NOW_FILE

LOOK_S = 1.0
"""Between two looks: short steps need not ask a shared disk each time."""


class SaveNow:
    """Whether somebody wants a checkpoint now; rank 0 looks, and all ranks agree on the step."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is the run's, on rank 0; None on the others, which do not look."""
        self.asked = False
        """What the ranks agreed on in the last step."""
        self._file = None if folder is None else folder / SAVE_NOW_FILE
        self._looked = float("-inf")
        self._name = ""
        """Of the checkpoint that was asked for, while it is being saved."""

    def look(self) -> bool:
        """Whether the file is there, and its save has not begun."""
        now = time.monotonic()
        if self._file is None or self._name or now - self._looked < LOOK_S:
            return False
        self._looked = now
        return self._file.exists()

    def begun(self, name: str) -> None:
        """The save that was asked for has begun: until it has ended, the file asks for nothing more."""
        self._name = name

    def ended(self, name: str) -> None:
        """A save has ended, well or not: take the file away, if it was the one that was asked for."""
        if name == self._name and self._file is not None:
            self._file.unlink(missing_ok=True)
            self._name = ""

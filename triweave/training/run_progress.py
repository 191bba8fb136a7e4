"""How far a run is, as every checkpoint says in JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from triweave import __version__
from triweave.checkpoint.places import locate
from triweave.checkpoint.store import DamagedCheckpoint, read_bytes
from triweave.errors import InputError, Problem

PROGRESS_FILE = "progress.json"
_LIMIT_BYTES = 2**20


def _torch_version() -> str:
    import torch  # here, and not above: who only reads how far a run is does without it

    return torch.__version__


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is, and what it must find again to go on."""

    step: int
    """Optimizer steps done; with the seed it is also the position in the data, and in the learning rate's schedule."""
    seed: int
    global_batch: int
    data: str
    """Fingerprint of the training data."""
    layout: str
    updates: int | None = None
    """Updates that Adam has counted; fewer than `step` where some were left out. Filled in by the save."""
    triweave: str = __version__
    torch: str = field(default_factory=_torch_version)


def read_progress(checkpoint: str | Path) -> RunProgress:
    """How far the run was when `checkpoint` was written.

    Raises:
        InputError: it is no checkpoint, or not a whole one.
    """
    try:
        values = json.loads(read_bytes(*locate(checkpoint), PROGRESS_FILE, _LIMIT_BYTES))
        progress = RunProgress(**values)
        counts = (progress.step, progress.seed, progress.global_batch, progress.updates or 0)
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("no counts")
        return progress
    except (DamagedCheckpoint, ValueError, TypeError, RecursionError):
        rule = f"is no checkpoint: it has no readable {PROGRESS_FILE}"
        raise InputError(Problem("resume", checkpoint, rule)) from None

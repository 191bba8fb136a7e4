"""Who writes down how a start of a run ended: see `recovery.starts`; and the end of one that has not begun.

The process that has started the ranks on one host hears how each failed, also one that was killed. Under a launcher
there is no such process of ours: each rank writes for itself, and of a rank that is killed those tell that lose it.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from triweave.config.validate import ResolvedRun
from triweave.errors import TriweaveError
from triweave.recovery.starts import DONE, FAILED, INTERRUPTED, LOST_A_PEER, STOPPED, note_end, note_end_of
from triweave.recovery.stop import STOPPED as STOPPED_CODE
from triweave.recovery.stop import signal_name
from triweave.run_folder import STOPPED_FILE
from triweave.training.process import Process

ON_REQUEST = "stopped on request"
BY_A_PERSON = "interrupted by Ctrl-C"


def heard(resolved: ResolvedRun, code: int, message: str, pids: Sequence[int]) -> None:
    """Write down what the process that started the ranks has heard of a bad end; of a good one rank 0 does."""
    if code == 130:
        note_end_of(pids, Path(resolved.run.output_dir), INTERRUPTED, BY_A_PERSON)
    elif code not in (0, STOPPED_CODE):
        note_end_of(pids, Path(resolved.run.output_dir), FAILED, message or f"exit code {code}")


@contextmanager
def noted(folder: Path, process: Process, lost_a_peer: Callable[[Exception], bool]) -> Iterator[None]:
    """Write down how the block ends on this rank, if nobody else hears it. The start is written down already.

    Args:
        folder: of the run.
        process: this rank.
        lost_a_peer: whether an error only says that another rank is gone.
    """
    if _is_heard(process):
        yield
        return
    try:
        yield
    except KeyboardInterrupt:
        note_end(folder, INTERRUPTED, BY_A_PERSON, process.rank)
        raise
    except Exception as error:
        said = str(error) if isinstance(error, TriweaveError) else traceback.format_exc()
        note_end(folder, LOST_A_PEER if lost_a_peer(error) else FAILED, said, process.rank)
        raise


def note_code(folder: Path, process: Process, code: int) -> None:
    """Write down that the run has ended well, or on request."""
    if process.rank == 0:
        note_end(folder, DONE if code == 0 else STOPPED, "" if code == 0 else ON_REQUEST, 0)


def leave_word(folder: Path, step: int, number: int) -> None:
    """Write down, for launchers that hide exit codes, that the run stands stopped by signal `number`."""
    said = {"step": step, "by": signal_name(number)}
    (folder / STOPPED_FILE).write_text(json.dumps(said) + "\n", encoding="utf-8")


def noting_leave(folder: Path, process: Process) -> Callable[[str], NoReturn]:
    """`process.leave`, which writes down first why, if nobody else hears it."""
    if _is_heard(process):
        return process.leave

    def leave(message: str) -> NoReturn:
        if message:
            note_end(folder, FAILED, message, process.rank)
        process.leave(message)

    return leave


def _is_heard(process: Process) -> bool:
    return process.store_port is not None

"""Every kind of hang: the one message names the rank and the place within the set time plus 2 s, and nobody is left."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_cases.rows import Row
from fault_cases.workshop import Plant, make_files, make_run, note_when, start

import triweave.training.loop as loop
import triweave.training.step as step
from triweave.groups import Group
from triweave.pipeline import _Execution
from triweave.recovery.watch import Watch
from triweave.schedule.actions import Kind
from triweave.training.process import Process

LIMIT_S = 3
SAVE_LIMIT_S = 10
LATE_S = 2.0
GUILTY = 1


@dataclass(frozen=True, slots=True)
class Hang:
    """A way to hang, and what the message must say of it."""

    name: str
    plant: Plant
    words: tuple[str, ...]
    layout: str = "tp2"
    keys: tuple[tuple[str, str], ...] = ()


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"layout.tp": 2},
    "pp2": {"layout.pp": 2},
    "dp3": {"layout.dp": 3, "train.global_batch": 6},
}


def forever(folder: Path) -> None:
    """Sleep, from now on."""
    note_when(folder)
    time.sleep(600)


def stop_oneself(folder: Path) -> None:
    """Be stopped by SIGSTOP, as by a debugger or a host that has gone silent."""
    note_when(folder)
    os.kill(os.getpid(), signal.SIGSTOP)


def keep_the_interpreter(folder: Path) -> None:
    """Sleep in C without giving the interpreter free: no thread of Python runs."""
    note_when(folder)
    ctypes.PyDLL(None).sleep(600)


def leave(folder: Path) -> None:
    """End as if all were well."""
    note_when(folder)
    os._exit(0)


def in_reading(what: Callable[[Path], None], folder: Path, process: Process) -> None:
    """Do it in the reading of step 3's data."""
    real = loop.training_batch

    def read(*args: Any, **keys: Any) -> Any:
        if process.rank == GUILTY and keys["step"] == 2:
            what(folder)
        return real(*args, **keys)

    loop.training_batch = read


def in_action(what: Callable[[Path], None], folder: Path, process: Process) -> None:
    """Do it in the forward of micro-batch 1, step 3."""
    real = Watch.mark

    def mark(self: Watch, action: Any) -> None:
        real(self, action)
        at = action is not None and action.kind is Kind.FORWARD and action.micro_batch == 1
        if process.rank == GUILTY and self.step == 3 and at:
            what(folder)

    Watch.mark = mark  # type: ignore[method-assign]


def in_saving(what: Callable[[Path], None], folder: Path, process: Process) -> None:
    """Do it where a file of the first checkpoint is handed to the disk."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if process.rank == GUILTY and str(folder) in os.readlink(f"/proc/self/fd/{descriptor}"):
            what(folder)
        real(descriptor)

    os.fsync = fsync


def in_validating(what: Callable[[Path], None], folder: Path, process: Process) -> None:
    """Do it in the validation."""
    real = loop.evaluate_step

    def evaluate(*args: Any) -> float:
        if process.rank == GUILTY:
            what(folder)
        return real(*args)

    loop.evaluate_step = evaluate


def in_third_sum(what: Callable[[torch.Tensor, Group], object], folder: Path, process: Process) -> None:
    """Do it before the sum at the end of step 3, which all ranks call."""
    real, calls = step.all_reduce, [0]

    def reduce(x: torch.Tensor, group: Group, *more: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            note_when(folder)
            if process.rank == GUILTY:
                what(x, group)
        return real(x, group, *more)

    step.all_reduce = reduce


def gather_too(x: torch.Tensor, group: Group) -> None:
    """Gather where the others sum."""
    dist.all_gather([torch.empty_like(x) for _ in range(group.size)], x, group=group.handle)


def stay_away(x: torch.Tensor, group: Group) -> None:
    """Never come to the sum: from then on this rank is one behind."""
    time.sleep(600)


def message_not_sent(folder: Path, process: Process) -> None:
    """Lose the gradient that stage 1 owes stage 0, in step 3."""
    real, calls = _Execution.give, [0]

    def give(self: _Execution, action: Any, result: torch.Tensor) -> None:
        calls[0] += process.rank == GUILTY
        if calls[0] == 4 * 2 + 1 and process.rank == GUILTY:
            note_when(folder)
            return
        real(self, action, result)

    _Execution.give = give  # type: ignore[method-assign]


VALIDATION = (("data.validation", "0.2"),)
HANGS = (
    Hang("data loader stuck", partial(in_reading, forever), ("Rank 1", "step 3, reading data", "time.sleep(600)")),
    Hang("sleeps in an action", partial(in_action, forever), ("Rank 1", "forward of stage 1, micro-batch 1"), "pp2"),
    Hang("sleeps in an action", partial(in_action, forever), ("Rank 1", "forward of stage 0, micro-batch 1"), "dp3"),
    Hang("stopped by SIGSTOP", partial(in_action, stop_oneself), ("Rank 1", "does not answer"), "dp3"),
    Hang("stopped by SIGSTOP", partial(in_action, stop_oneself), ("Rank 1", "does not answer"), "pp2"),
    Hang("keeps the interpreter", partial(in_action, keep_the_interpreter), ("Rank 1", "does not answer"), "dp3"),
    Hang(
        "in another collective",
        partial(in_third_sum, gather_too),
        ("Rank 1", "in another collective", "all_gather"),
        "dp3",
    ),
    Hang(
        "does not come to a collective", partial(in_third_sum, stay_away), ("Rank 1", "waits for no other rank"), "dp3"
    ),
    Hang("a message not sent", message_not_sent, ("step 3",), "pp2"),
    Hang("save stuck", partial(in_saving, forever), ("Rank 1", "saving"), "dp3"),
    Hang("save stuck", partial(in_saving, stop_oneself), ("Rank 1", "does not answer"), "tp2"),
    Hang("validation stuck", partial(in_validating, forever), ("Rank 1", "validating"), "tp2", VALIDATION),
    Hang("left as if well", partial(in_action, leave), ("rank 1 left with exit code 0",), "dp3"),
)
QUICK = (3, 6)


def run(quick: bool, out: Path) -> list[Row]:
    """Plant each hang."""
    make_files(out, quick=quick)
    rows = []
    for number, hang in enumerate(HANGS):
        if quick and number not in QUICK:
            continue
        keys = {"runtime.hang_timeout_s": LIMIT_S, "runtime.timeout_s": SAVE_LIMIT_S, **LAYOUTS[hang.layout]}
        limit_s = SAVE_LIMIT_S if "save" in hang.name else LIMIT_S
        resolved, prepared = make_run(out, f"hang-{number}", {**keys, **dict(hang.keys)})
        outcome = start(resolved, prepared, hang.plant)
        wrong = [word for word in hang.words if word not in outcome.said]
        late_s = outcome.ended_after_s - limit_s
        left = len(multiprocessing.active_children())
        good = not wrong and outcome.code == 1 and late_s < LATE_S and left == 0
        detail = f"all ranks gone {outcome.ended_after_s:.1f} s after it, limit {limit_s} s"
        if not good:
            detail += f"; lacks {wrong}, code {outcome.code}, {left} left: {outcome.said.strip()[:1500]}"
        rows.append(Row(f"hang: {hang.name} ({hang.layout})", 1, int(good), detail))
    return rows

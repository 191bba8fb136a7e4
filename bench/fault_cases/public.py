"""Faults that other projects' trackers tell of, planted here: numbers are those of the table in docs/recovery.md.

Saves, damages, signals and restarts are tried by the other modules; here is the rest that a CPU shows.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_cases.kills import bits, newest
from fault_cases.rows import Row
from fault_cases.stops import stopped_at
from fault_cases.workshop import Outcome, Plant, course, make_files, make_run, no_fault, start

import triweave.training.loop as loop
import triweave.training.rank as rank_module
import triweave.training.resume as resume_module
from triweave.errors import RunFailed
from triweave.recovery.stop import STOPPED
from triweave.recovery.watch import Watch
from triweave.training.process import Process

ODD = 1
"""The rank with the fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and how the run must end."""

    name: str
    plant: Plant
    holds: Callable[[Outcome, Path, Path], bool]
    """Told the outcome, the run's folder and the folder of the run without a fault."""
    from_step: int = 0
    """Begin from a run that was stopped here."""
    keys: tuple[tuple[str, Any], ...] = ()


def only_odd(plant: Callable[[], None], folder: Path, process: Process) -> None:
    """Plant it on one rank."""
    if process.rank == ODD:
        plant()


def as_if_nothing_had_been(outcome: Outcome, output: Path, expected: Path) -> bool:
    """The run came to its end, bit for bit."""
    return outcome.code == 0 and course(output) == course(expected) and bits(output) == bits(expected)


def says(*words: str) -> Callable[[Outcome, Path, Path], bool]:
    """The run ended with one message that holds all the words."""

    def holds(outcome: Outcome, output: Path, expected: Path) -> bool:
        return outcome.code == 1 and outcome.said.count("error: ") == 1 and all(word in outcome.said for word in words)

    return holds


def fail_first_fsync() -> None:
    """An I/O error in the first save, once."""
    real, calls = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    os.fsync = fsync


def come_late() -> None:
    """Do not come to where the ranks meet."""
    rank_module.check_same = lambda *_: time.sleep(60)  # type: ignore[assignment]


def fail_to_load() -> None:
    """An error in reading the checkpoint, on one rank."""

    def load(*_: Any) -> Any:
        raise RunFailed("rank 1 cannot read its part")

    resume_module.load_checkpoint = load


def see_no_checkpoint() -> None:
    """A shared disk that lags behind: this rank sees no checkpoint."""
    resume_module.found = lambda store: []


def clock_ahead() -> None:
    """A clock that is an hour ahead."""
    real = time.time
    time.time = lambda: real() + 3600.0


def other_fact(key: str, value: str) -> None:
    """Another value of a key on this rank."""
    real = rank_module.facts_of
    rank_module.facts_of = lambda *given: {**real(*given), key: value}


def other_type() -> None:
    """Sum int32 where the others sum float32."""
    real, calls = dist.all_reduce, [0]

    def reduce(x: torch.Tensor, *more: Any, **keys: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3 and x.dtype is torch.float32:
            return real(x.view(torch.int32), *more, **keys)
        return real(x, *more, **keys)

    dist.all_reduce = reduce


def not_a_number(steps: tuple[int, ...], folder: Path, process: Process) -> None:
    """A NaN in the first weight's gradient sum path: the loss of micro-batch 0 in these steps."""
    real_mark, real_step, now = Watch.mark, loop.train_step, [-1, -1]

    def mark(self: Watch, action: Any) -> None:
        now[0], now[1] = self.step, -1 if action is None else action.micro_batch
        real_mark(self, action)

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        return output * math.nan if now[0] in steps and now[1] == 1 and process.rank == ODD else None

    def step(engine: Any, *given: Any) -> Any:
        for stage in engine.stages.values():
            for layer in stage.model.layers.values():
                if not layer.self_attn.o_proj._forward_hooks:
                    layer.self_attn.o_proj.register_forward_hook(spoil)
        return real_step(engine, *given)

    Watch.mark, loop.train_step = mark, step  # type: ignore[method-assign]


def signals_apart(folder: Path, process: Process) -> None:
    """SIGTERM to one rank in step 2, to the other 30 ms later."""
    real = Watch.mark

    def mark(self: Watch, action: Any) -> None:
        real(self, action)
        if self.step == 2 and not (folder / f"asked-{process.rank}").exists():
            (folder / f"asked-{process.rank}").touch()
            threading.Timer(0.03 * process.rank, os.kill, (os.getpid(), signal.SIGTERM)).start()

    Watch.mark = mark  # type: ignore[method-assign]


def stops_at_one_step(outcome: Outcome, output: Path, expected: Path) -> bool:
    """All ranks stopped after the same step, and it was saved."""
    return outcome.code == STOPPED and stopped_at(output) == newest(output)


def skipped(outcome: Outcome, output: Path, expected: Path) -> bool:
    """The run came to its end, and has kept the batch of the step that it skipped."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return outcome.code == 0 and '"loss": null' in lines[2] and (output / "not-finite" / "step-3.npz").exists()


def segfault_in_first_save() -> None:
    """The thread that saves does what no process survives."""
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGSEGV)


def no_room_for_the_export(folder: Path, process: Process) -> None:
    """The disk is full when the Hugging Face folder is written, after everything that matters."""

    def export(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if process.rank == 0:
        loop.export_hugging_face = export


def dies_and_leaves_nothing(outcome: Outcome, output: Path, expected: Path) -> bool:
    """The message says how the rank died, and what it was writing is not there."""
    return outcome.code == 1 and "rank 1 was ended by SIGSEGV" in outcome.said and newest(output) == 0


def keeps_the_last_step(outcome: Outcome, output: Path, expected: Path) -> bool:
    """The run fails and says why; its last checkpoint is there, bit for bit that of the run that did not fail."""
    same = weights_of(output) == weights_of(expected)
    return outcome.code == 1 and "No space left on device" in outcome.said and same


def weights_of(output: Path) -> list[str]:
    """Hashes of the data files of the last checkpoint."""
    files = sorted((output / "checkpoints" / f"step-{newest(output)}").glob("*.distcp"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


FAULTS = (
    Fault("1: a writer fails once on one rank", partial(only_odd, fail_first_fsync), as_if_nothing_had_been),
    Fault("3: a rank does not come", partial(only_odd, come_late), says("rank 1 has not come within")),
    Fault("19: the saving thread dies of SIGSEGV", partial(only_odd, segfault_in_first_save), dies_and_leaves_nothing),
    Fault("22: validation after a resume", no_fault, as_if_nothing_had_been, 4, (("validation.every_steps", 1),)),
    Fault("23: one rank fails to load", partial(only_odd, fail_to_load), says("rank 1 cannot read its part"), 4),
    Fault("38: resumed in a later epoch", no_fault, as_if_nothing_had_been, 40),
    Fault("41: one rank sees no checkpoint", partial(only_odd, see_no_checkpoint), as_if_nothing_had_been, 4),
    Fault("43: the export fails", no_room_for_the_export, keeps_the_last_step),
    Fault("46: one rank's clock is an hour ahead", partial(only_odd, clock_ahead), as_if_nothing_had_been, 4),
    Fault("48: ranks get SIGTERM at different moments", signals_apart, stops_at_one_step),
    Fault(
        "another learning rate on one rank",
        partial(only_odd, partial(other_fact, "optimizer.learning_rate", "0.1")),
        says("rank 1: optimizer.learning_rate is 0.1"),
    ),
    Fault(
        "other data on one rank",
        partial(only_odd, partial(other_fact, "training data", "x")),
        says("rank 1: training data"),
    ),
    Fault(
        "another torch on one rank",
        partial(only_odd, partial(other_fact, "torch", "1.0")),
        says("rank 1: torch is 1.0"),
    ),
    Fault("int32 among float32 on one rank", partial(only_odd, other_type), says("called all_reduce", "(Int [")),
    Fault(
        "NaN on one rank, stop", partial(not_a_number, (3,)), says("step 3", "micro-batch 1", "o_proj", "step-3.npz")
    ),
    Fault("NaN on one rank, skip", partial(not_a_number, (3,)), skipped, 0, (("train.on_not_finite", "skip"),)),
    Fault(
        "NaN without end, skip",
        partial(not_a_number, tuple(range(3, 99))),
        says("3 steps in a row were skipped"),
        0,
        (("train.on_not_finite", "skip"), ("train.max_skipped_steps", 3)),
    ),
)
QUICK = ("41", "int32")


def stop_at(step: int, folder: Path, process: Process) -> None:
    """SIGTERM in a step: the run ends after it."""
    real = Watch.enter

    def enter(self: Watch, section: str, at: int, **keys: Any) -> None:
        real(self, section, at, **keys)
        if section == "computing" and at == step and process.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    Watch.enter = enter  # type: ignore[method-assign]


def run(quick: bool, out: Path) -> list[Row]:
    """Plant each fault. Faults of the same run file share the run without one."""
    make_files(out, quick=quick)
    rows, references = [], dict[str, Path]()
    for fault in FAULTS:
        if quick and not fault.name.startswith(QUICK):
            continue
        keys: dict[str, Any] = {
            "layout.dp": 2,
            "data.validation": "0.2",
            "checkpoint.export": "true",
            "runtime.timeout_s": 20,
        }
        keys |= {"train.steps": max(6, fault.from_step + 4), **dict(fault.keys)}
        if (named := str(keys)) not in references:
            reference, prepared = make_run(out, f"reference-{len(references)}", keys)
            start(reference, prepared)
            references[named] = Path(reference.run.output_dir)
        resolved, prepared = make_run(out, "faulty", keys)
        output = Path(resolved.run.output_dir)
        if fault.from_step:
            stopped = start(resolved, prepared, partial(stop_at, fault.from_step))
            if stopped.code != STOPPED:
                rows.append(Row(fault.name, 1, 0, f"could not be stopped: {stopped.said[:500]}"))
                continue
        outcome = start(resolved, prepared, fault.plant)
        good = fault.holds(outcome, output, references[named])
        rows.append(Row(fault.name, 1, int(good), "" if good else f"code {outcome.code}: {outcome.said.strip()[:800]}"))
        shutil.rmtree(output)
    return rows
